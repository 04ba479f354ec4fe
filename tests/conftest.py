"""Settings for all tests: no downloads, checked integers, and the profiles of hypothesis.

The same commit draws the same examples, so that a change answers for its own failures alone; the
edges are pinned by `@example`. `python -m tests.support.new_draws` draws new ones from seeds that
it prints.
"""

import os

import triton.language as tl
from hypothesis import settings
from triton.runtime import interpreter

from deft_backend.compile import triton_kernel

os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("random", deadline=None, print_blob=True, database=None)
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("random" if os.environ.get("DEFT_RANDOM_TESTS") == "1" else "repeatable")

triton_kernel.check_overflow = True


def _patch_the_language_once() -> None:
    """A quarter of the interpreter's time: each nested call of a kernel patches the language anew.

    The patch of the kernel itself, which the interpreter takes back at its end, is enough.
    """
    real, modules = interpreter._patch_lang, {}

    def patch(function):
        if function not in modules:
            names = function.__globals__.values()
            modules[function] = [module for module in names if module is tl or module is tl.core]
        if any(tl.core.is_builtin(module.load) for module in modules[function]):
            return real(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch


if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):  # Triton 3.6 on
    _patch_the_language_once()
