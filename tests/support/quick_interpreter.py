"""Triton's interpreter with less of Python's work for each operation, and the same results.

The interpreter patches the language anew for every call of a nested function, derives types and
dtypes anew for every tensor, and checks integers by more operations. This takes more than half of
the time of a kernel on the CPU.
"""

import functools

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_CLOSED = {"int32", "int64", "fp32"}
"""Types of which two operands need no conversion, whatever the operation."""


def _product(a, b, dtype=None, _matmul=np.matmul, **options):
    """The bits of a row do not depend on its place; those of `numpy.matmul` do on some CPUs."""
    if options or np.ndim(a) != 2 or np.ndim(b) != 2:
        return _matmul(a, b, dtype=dtype, **options)
    return np.einsum("ik,jk->ij", *(np.ascontiguousarray(x, dtype=dtype) for x in (a, b.T)))


@functools.cache
def install():
    """Patch Triton's interpreter in this process, once."""
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _patch_the_language_once()  # Triton 3.6 on
    _remember_block_types()
    _convert_and_check_less()
    real, known = interpreter._get_np_dtype, {}
    interpreter._get_np_dtype = lambda dtype: (
        known.get(dtype.name) or known.setdefault(dtype.name, real(dtype))
    )
    _poison_what_masks_leave_out()
    np.matmul = _product


def _poison_what_masks_leave_out():
    """A load without `other` gives any number where its mask is not set, as on a GPU, not 0."""
    builder = interpreter.InterpreterBuilder
    real = builder.create_masked_load

    def load(self, ptrs, mask, other, *options):
        if other is None and ptrs.data.size > 1:  # of a single number, the interpreter drops a 0
            kind = ptrs.get_element_ty()
            values = np.full_like(ptrs.data, 0x7F, dtype=interpreter._get_np_dtype(kind))
            other = interpreter.TensorHandle(values, kind)
        return real(self, ptrs, mask, other, *options)

    builder.create_masked_load = load


def _patch_the_language_once():
    """Leave nested calls the patch of the kernel itself, which the interpreter takes back."""
    real, modules = interpreter._patch_lang, {}

    def patch(function):
        if function not in modules:
            names = function.__globals__.values()
            modules[function] = [module for module in names if module is tl or module is tl.core]
        if any(tl.core.is_builtin(module.load) for module in modules[function]):
            return real(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch


def _remember_block_types():
    """Names and sizes of block types follow from the element's name and the shape."""
    real, known = tl.core.block_type.__init__, {}

    def init(self, element_ty, shape):
        values = shape.values if isinstance(shape, tl.core.tuple) else shape
        sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in values])
        key = (element_ty.name, sizes)
        if key not in known:
            real(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    tl.core.block_type.__init__ = init


def _convert_and_check_less():
    """Operands of one type and shape need no conversion; NumPy shows an overflow by itself.

    Triton's own check computes the same and then asserts nothing, because `debug` is off.
    """
    semantic = interpreter.interpreter_semantic
    real_broadcast = semantic.broadcast_impl_value
    real_checking = semantic.binary_op_type_checking_impl

    def broadcast(lhs, rhs):
        both = lhs.type.is_block() and rhs.type.is_block()
        if both and tuple(lhs.type.shape) == tuple(rhs.type.shape):
            return lhs, rhs
        return real_broadcast(lhs, rhs)

    def checking(lhs, rhs, *arguments, **options):
        tensors = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor)
        if tensors and lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in _CLOSED:
            return broadcast(lhs, rhs)
        return real_checking(lhs, rhs, *arguments, **options)

    def sanitize(lhs, rhs, operation):
        integer = lhs.dtype
        if semantic.builder.options.sanitize_overflow and integer.int_bitwidth < 64:
            wide = _EXACT[operation.__name__](
                lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64)
            )
            low, high = integer.get_int_min_value(), integer.get_int_max_value()
            if wide.min() < low or wide.max() > high:
                raise OverflowError(f"{integer} overflow detected for {operation.__name__}")

    semantic.broadcast_impl_value = broadcast
    semantic.binary_op_type_checking_impl = checking
    semantic.binary_op_sanitize_overflow_impl = sanitize
