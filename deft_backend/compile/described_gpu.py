"""Compile for a GPU that is not at hand: Triton asks its driver for the GPU, nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class _Driver:
    """Answers what Triton asks before it compiles. Nothing can be loaded or launched."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        """The GPU that Triton compiles for."""
        return self._target

    def get_current_device(self) -> object:
        """The key under which a kernel keeps compiled code in memory: each driver has its own.

        So a driver never takes code from memory that another driver compiled into another folder.
        """
        return self

    def get_current_stream(self, device: object) -> int:
        """Asked before every launch, real or not."""
        return 0


@contextmanager
def compiling_for(arch: int) -> Iterator[None]:
    """Let Triton compile for NVIDIA GPUs of an architecture, such as 90, in the ``with`` block."""
    before = getattr(driver, "_active", None)
    driver.set_active(_Driver(arch))
    try:
        yield
    finally:
        driver.set_active(before)
