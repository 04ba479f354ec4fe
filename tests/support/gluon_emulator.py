"""An interpreter, in NumPy, of the part of Gluon that the kernels use.

The emulator loads a kernel's module a second time, with these names instead of Triton's. The
programs run one after another as ordinary Python. Layouts have no effect here. Everything else is
strict. Shared memory holds NaN until a copy has arrived. Copies arrive only when the program waits
for them. An address outside its tensor is an error.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache, reduce
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from deft_backend.kernels.plain import eight_bits as plain_eight_bits

PARTS = [
    importlib.import_module(f"deft_backend.kernels.hopper.{name}")
    for name in (
        *("versions", "eight_bits", "parts"),
        *(f"small_tile_{part}" for part in ("memory", "copies", "results")),
        *(f"large_tile_{part}" for part in ("memory", "copies", "results")),
        *("masked_tile_segments", "masked_tile_copies"),
    )
]
"""Modules that kernels import functions in Gluon from; each uses none but those before it."""


class DType(NamedTuple):
    """An element type under the kernels' name for it."""

    np: np.dtype


class Tensor(np.ndarray):
    """Values in registers: an assignment names new values and changes no old ones."""

    def __iadd__(self, other):
        return self + other

    def __isub__(self, other):
        return self - other

    def __imul__(self, other):
        return self * other

    @property
    def type(self):
        return SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        return _tensor(self.view(dtype.np) if bitcast else self.astype(dtype.np))


def _tensor(values):
    return np.asarray(values).view(Tensor)


POISON = {"f": np.nan, "i": 0x7F, "u": 0x7F, "b": True}
"""What a GPU may find where a mask leaves a value out and the load names no other."""


class Pointer:
    """Addresses within one tensor's memory."""

    def __init__(self, memory, offset=0):
        self.memory = memory
        self.offset = np.asarray(offset, dtype=np.int64)

    @property
    def dtype(self):
        return SimpleNamespace(element_ty=DType(self.memory.dtype))

    def to(self, dtype, bitcast=False):
        if not bitcast:  # the address
            assert dtype == DType(np.dtype("int64"))
            return np.int64(self.memory.ctypes.data) + self.offset * self.memory.itemsize
        offset = self.offset * self.memory.itemsize // dtype.np.itemsize
        return Pointer(self.memory.view(dtype.np), offset)

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + np.asarray(offset).astype(np.int64))

    def read(self, mask=None, other=None):
        if mask is None:
            self._check(self.offset)
            return _tensor(self.memory[self.offset])
        offset, mask = np.broadcast_arrays(self.offset, np.asarray(mask))
        self._check(offset[mask])
        values = np.full(offset.shape, POISON[self.memory.dtype.kind], dtype=self.memory.dtype)
        if other is not None:
            values[...] = other
        values[mask] = self.memory[offset[mask]]
        return _tensor(values)

    def write(self, values, mask=None):
        mask = True if mask is None else np.asarray(mask)
        offset, values, mask = np.broadcast_arrays(self.offset, np.asarray(values), mask)
        self._check(offset[mask])
        self.memory[offset[mask]] = values[mask]

    def _check(self, offset):
        if offset.size and (offset.min() < 0 or offset.max() >= len(self.memory)):
            raise IndexError(
                f"addresses {offset.min()} to {offset.max()} of a tensor of {len(self.memory)}"
            )


class Shared:
    """Shared memory: elements are NaN until they are written."""

    def __init__(self, values):
        self.values = values

    def index(self, at):
        assert 0 <= at < len(self.values), f"buffer {at} of {len(self.values)}"
        return Shared(self.values[int(at)])

    def permute(self, order):
        return Shared(self.values.transpose(order))

    def slice(self, start, length, dim=0):
        cut = [slice(None)] * self.values.ndim
        cut[dim] = slice(start, start + length)
        return Shared(self.values[tuple(cut)])

    def store(self, values):
        assert values.shape == self.values.shape
        self.values[...] = np.asarray(values)

    def load(self, layout):
        return _tensor(self.values.copy())

    @property
    def dtype(self):
        return DType(self.values.dtype)

    @property
    def shape(self):
        return self.values.shape

    def reinterpret(self, dtype, shape, layout):
        found = self.values.view(dtype.np).reshape(shape)
        assert np.shares_memory(found, self.values)
        return Shared(found)


class _Machine:
    """Where the program that runs stands, and its copies on their way."""

    def __init__(self):
        self.program = self.programs = self.warps = 0
        self.sms = (0,)
        self.begun = []
        self.groups = []

    def copy(self, buffer, source, mask=None, **_):
        def land():
            buffer.store(source.read(mask, 0))

        source.read(mask)  # a wrong address is an error at once, not when the copy arrives
        self.begun.append(land)

    def commit(self):
        self.groups.append(self.begun)
        self.begun = []

    def wait(self, outstanding):
        while len(self.groups) > outstanding:
            for land in self.groups.pop(0):
                land()


_MACHINE = _Machine()


def _values(operand):
    return np.asarray(operand.values if isinstance(operand, Shared) else operand, dtype=np.float32)


def _product(a, b, acc, use_acc=True, is_async=False, **_):
    found = _values(a) @ _values(b)
    return _tensor(np.asarray(acc) + found if use_acc else found)


def _reduce(values, axis, combine):
    parts = np.moveaxis(np.asarray(values), axis, 0)
    return _tensor(reduce(combine, [_tensor(part) for part in parts]))


def _numbers(values, kind):
    """float16 of bytes; NaN where memory was never written."""
    return _tensor(torch.from_numpy(values.astype(np.uint8)).view(kind).half().numpy())


def _inlined(asm, constraints, args, **_):
    for kind, name in ((torch.float8_e4m3fn, "E4M3"), (torch.float8_e5m2, "E5M2")):
        bytes_ = getattr(plain_eight_bits, f"{name}_TO_FLOAT16")
        pairs = getattr(plain_eight_bits, f"{name}_PAIRS_TO_FLOAT16")
        if asm == bytes_.value:
            return _numbers(np.asarray(args[0]), kind)
        if asm == pairs.value:
            bits = np.asarray(args[0]).view(np.uint16)
            return _numbers(bits & 0xFF, kind), _numbers(bits >> 8, kind)
    if "%smid" in asm:
        return _tensor(np.int32(_MACHINE.sms[_MACHINE.program]))
    if "atom.relaxed" in asm:  # programs run one after the other: nothing comes in between
        pointer, thread = args
        before = pointer.read() * (np.asarray(thread) == 0)
        pointer.write(pointer.read() + 1, np.asarray(thread) == 0)
        return _tensor(before)
    if "shfl.sync.idx" in asm:  # the last axis counts the lanes of a warp
        found, lane = np.broadcast_arrays(*(np.asarray(arg) for arg in args))
        assert found.shape[-1] == 32
        assert (found == found.astype(np.int32)).all()
        return _tensor(np.take_along_axis(found.astype(np.int32), lane, -1))
    if "prefetch" in asm:  # as strict about addresses as a load
        pointer, wanted = args
        return pointer.read(np.asarray(wanted) != 0) * 0
    assert "@below st.shared" in asm  # a masked store
    (sums,) = args
    assert not np.signbit(np.asarray(sums)).any()
    return sums


def _expanded(values, axis):
    if isinstance(values, Pointer):
        return Pointer(values.memory, np.expand_dims(values.offset, axis))
    return _tensor(np.expand_dims(np.asarray(values), axis))


def _elementwise(function):
    return lambda *operands: _tensor(function(*(np.asarray(o) for o in operands)))


def _where(condition, left, right):
    found = np.where(np.asarray(condition), np.asarray(left), np.asarray(right))
    kinds = [v.dtype for v in (left, right) if isinstance(v, np.ndarray)]
    return _tensor(found.astype(np.result_type(*kinds)) if kinds else found)


def _full(shape, value, dtype, layout=None):
    return _tensor(np.full(shape, value, dtype=dtype.np))


def _range(*bounds):
    """Loop counters are 32-bit integers of the device."""
    return (_tensor(np.int32(i)) for i in range(*map(int, bounds)))


def _static_assert(condition):
    assert condition


def _unchanged(function):
    return function


def _language():
    """The module that kernels import as ``gl``."""
    gl = ModuleType("triton.experimental.gluon.language")
    for layout in ("NVMMADistributed", "DotOperand", "Slice", "NVMMAShared", "Blocked"):
        setattr(gl, f"{layout}Layout", lambda *args, **options: None)
    gl.SwizzledSharedLayout = gl.BlockedLayout
    for name in ("int16", "int32", "uint32", "int64", "uint64", "float16", "float32"):
        setattr(gl, name, DType(np.dtype(name)))
    gl.int1 = DType(np.dtype(bool))
    gl.join = lambda left, right: _tensor(np.stack([left, right], axis=-1))
    gl.constexpr = lambda value: value
    gl.shared_memory_descriptor = Shared
    gl.pointer_type = lambda dtype: dtype
    gl.program_id = lambda axis: _tensor(np.int32(_MACHINE.program))
    gl.num_programs = lambda axis: _MACHINE.programs
    gl.num_warps = lambda: _MACHINE.warps
    gl.static_range = range
    gl.static_assert = _static_assert
    gl.load = lambda pointer, mask=None, other=None, volatile=False: pointer.read(mask, other)
    gl.store = lambda pointer, values, mask=None: pointer.write(values, mask)
    gl.arange = lambda start, end, layout=None: _tensor(np.arange(start, end, dtype=np.int32))
    gl.full = _full
    gl.zeros = lambda shape, dtype, layout=None: _full(shape, 0, dtype)
    gl.convert_layout = lambda values, layout: values
    gl.reshape = lambda values, shape: _tensor(np.asarray(values).reshape(shape))
    gl.permute = lambda values, order: _tensor(np.asarray(values).transpose(order))
    gl.split = lambda values: (values[..., 0], values[..., 1])
    gl.expand_dims = _expanded
    gl.where = _where
    gl.reduce = _reduce
    gl.inline_asm_elementwise = _inlined
    gl.maximum, gl.minimum = _elementwise(np.maximum), _elementwise(np.minimum)
    gl.exp2, gl.log2, gl.abs = map(_elementwise, (np.exp2, np.log2, np.abs))
    gl.fma = _elementwise(lambda a, b, c: (a * b + c).astype(np.float32))
    gl.allocate_shared_memory = lambda dtype, shape, layout: Shared(
        np.full(shape, 0xFF if dtype.np == np.uint8 else np.nan, dtype=dtype.np)
    )
    gl.barrier = lambda: None
    return gl


def _stand_ins():
    def module(name, **members):
        made = ModuleType(name)
        vars(made).update(members)
        return made

    gluon = "triton.experimental.gluon"
    nothing = {name: lambda: None for name in ("gdc_launch_dependents", "gdc_wait")}
    language = _language()
    found = (
        module(gluon, jit=_unchanged, constexpr_function=_unchanged, language=language),
        language,
        module(
            f"{gluon}.language.nvidia.ampere.async_copy",
            async_load=_MACHINE.copy,
            commit_group=_MACHINE.commit,
            wait_group=_MACHINE.wait,
        ),
        module(f"{gluon}.language.nvidia.ampere", mma_v2=_product),
        module(
            f"{gluon}.language.nvidia.hopper",
            fence_async_shared=lambda: None,
            warpgroup_mma=_product,
            warpgroup_mma_wait=lambda _, deps: deps[0] if len(deps) == 1 else tuple(deps),
        ),
        module("triton.language.extra.cuda", **nothing),
    )
    return {made.__name__: made for made in found}


@lru_cache
def emulated(module):
    """A copy of a kernel's module that runs in Python."""
    name = f"{module.__name__}_emulated"
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    copy = importlib.util.module_from_spec(spec)
    vars(copy)["range"] = _range
    stand_ins = dict(_stand_ins())
    used = PARTS[: PARTS.index(module)] if module in PARTS else PARTS
    stand_ins.update({part.__name__: emulated(part) for part in used})
    with patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(copy)
    return copy


def run(module, name, programs, arguments, constants, *, num_warps):
    """Run a kernel over tensors on the CPU, program after program."""
    kernel = getattr(emulated(module), name)
    given = [_argument(value) for value in arguments]
    _MACHINE.programs, _MACHINE.warps = programs, num_warps
    # Programs lie anywhere.
    _MACHINE.sms = np.random.default_rng(programs).integers(0, programs, programs).tolist()
    with np.errstate(all="ignore"):
        for program in range(programs):
            _MACHINE.program = program
            kernel(*given, **constants)
            assert not _MACHINE.begun, "copies that belong to no group"
            _MACHINE.wait(0)


def _argument(value):
    """A tensor's memory from its first element on, with integers in the GPU's type."""
    if isinstance(value, tuple):  # a structure
        return type(value)(*map(_argument, value))
    if isinstance(value, torch.Tensor):
        length = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
        return Pointer(torch.as_strided(value, (length,), (1,)).numpy())
    return _tensor(np.float32(value)) if isinstance(value, float) else value
