"""Triton's interpreter with less of Python's work for each operation, and the same results.

The interpreter patches the language anew for every call of a nested function, and derives types,
shapes and dtypes anew for every tensor. These take half of the time of a kernel on the CPU.
"""

import functools
import math

import triton.language as tl
from triton.runtime import interpreter

_installed = False


def install():
    """Patch Triton's interpreter in this process, once."""
    global _installed
    if _installed:
        return
    _installed = True
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _patch_the_language_once()  # Triton 3.6 on
    _remember_block_types()
    _remember_shapes_of_tensors()
    _broadcast_only_different_shapes()
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)


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


def _remember_shapes_of_tensors():
    known = {}

    def init(self, handle, type):
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in known:
            shape = tl.core.tuple([tl.constexpr(size) for size in sizes])
            known[sizes] = shape, tl.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    tl.core.tensor.__init__ = init


def _broadcast_only_different_shapes():
    real = tl.semantic.TritonSemantic.broadcast_impl_value

    def broadcast(self, lhs, rhs):
        both = lhs.type.is_block() and rhs.type.is_block()
        if both and tuple(lhs.type.shape) == tuple(rhs.type.shape):
            return lhs, rhs
        return real(self, lhs, rhs)

    tl.semantic.TritonSemantic.broadcast_impl_value = broadcast


def _by_name(function):
    """The function of a dtype, called once for each dtype's name."""
    known = {}

    @functools.wraps(function)
    def remembered(dtype):
        if dtype.name not in known:
            known[dtype.name] = function(dtype)
        return known[dtype.name]

    return remembered
