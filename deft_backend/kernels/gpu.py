"""The properties of a GPU that kernel configurations follow from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SHARED_KIB = {
    "sm_80": 164,
    "sm_86": 100,
    "sm_87": 164,
    "sm_89": 100,
    "sm_90": 228,
    "sm_100": 228,
    "sm_120": 100,
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
        found = torch.cuda.get_device_properties(device)
        return cls(
            (found.major, found.minor),
            found.multi_processor_count,
            found.shared_memory_per_multiprocessor,
            found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        )

    @classmethod
    def named(cls, name: str) -> Gpu:
        """A GPU of a compute capability, such as ``sm_90``, with an H100's SMs: these decide how
        many programs run, not how they are compiled. Raises ValueError for others than
        :meth:`names`.
        """
        if name not in _SHARED_KIB:
            raise ValueError(f"{name!r}; expected one of {', '.join(_SHARED_KIB)}")
        shared = _SHARED_KIB[name] * 1024
        return cls((int(name[3:-1]), int(name[-1])), 132, shared, shared - 1024)

    @property
    def name(self) -> str:
        """As the assembler calls it: ``sm_90``."""
        return f"sm_{self.arch}"

    @property
    def arch(self) -> int:
        """As Triton calls it: 90."""
        return self.capability[0] * 10 + self.capability[1]

    @staticmethod
    def names() -> tuple[str, ...]:
        return tuple(_SHARED_KIB)
