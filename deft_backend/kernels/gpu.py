"""The properties of a GPU that kernel configurations follow from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SHARED_KIB = {
    (8, 0): 164,
    (8, 6): 100,
    (8, 7): 164,
    (8, 9): 100,
    (9, 0): 228,
    (10, 0): 228,
    (12, 0): 100,
}
"""KiB of shared memory of an SM (CUDA C++ Programming Guide, Table "Technical Specifications per
Compute Capability"). A program may take 1 KiB less."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, at hand or described by its compute capability."""

    capability: tuple[int, int]  # major and minor compute capability
    sms: int
    # Bytes of shared memory.
    shared_per_sm: int
    shared_per_program: int

    @classmethod
    def at(cls, device: torch.device) -> Gpu:
        """The GPU behind a device."""
        found = torch.cuda.get_device_properties(device)
        return cls(
            (found.major, found.minor),
            found.multi_processor_count,
            found.shared_memory_per_multiprocessor,
            found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        )

    @classmethod
    def named(cls, name: str) -> Gpu:
        """A GPU of a compute capability, such as ``sm_90``: as far as compiled code depends on it.

        The number of SMs is an H100's. It decides how many programs run, not how they are compiled.

        Raises
        ------
        ValueError
            If the name is not one of :meth:`names`.
        """
        found = {cls._name(capability): capability for capability in _SHARED_KIB}
        if name not in found:
            raise ValueError(f"{name!r}; expected one of {', '.join(found)}")
        shared = _SHARED_KIB[found[name]] * 1024
        return cls(found[name], 132, shared, shared - 1024)

    @property
    def name(self) -> str:
        """As the assembler calls it: ``sm_90``."""
        return self._name(self.capability)

    @property
    def arch(self) -> int:
        """As Triton calls it: 90."""
        return self.capability[0] * 10 + self.capability[1]

    @staticmethod
    def names() -> tuple[str, ...]:
        """The GPUs that can be described."""
        return tuple(Gpu._name(capability) for capability in _SHARED_KIB)

    @staticmethod
    def _name(capability: tuple[int, int]) -> str:
        return f"sm_{capability[0]}{capability[1]}"
