"""What the driver tells of a GPU: enough to carry a cost table from one GPU to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GpuFacts:
    """Size and clocks of a GPU."""

    sms: int  # streaming multiprocessors
    sm_clock_mhz: float  # highest clock of an SM, in MHz
    # Bandwidth of the memory by its clock and its bus, in 1e9 bytes per second. No kernel reads as
    # fast; a cost table holds what one reads.
    memory_gb_s: float


def gpu_facts(device: torch.device) -> GpuFacts | None:
    """The facts of a CUDA device; None for the CPU, and for a driver that does not tell them."""
    if device.type != "cuda":
        return None
    import torch  # reading a shipped table needs none of it

    properties: Any = torch.cuda.get_device_properties(device)
    clock_khz = getattr(properties, "clock_rate", 0)
    memory_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    if min(clock_khz, memory_khz, bus_bits) <= 0:  # a part of a GPU, or a virtual one
        return None
    # Two transfers a clock, eight bits a byte.
    return GpuFacts(
        sms=properties.multi_processor_count,
        sm_clock_mhz=clock_khz / 1e3,
        memory_gb_s=2 * memory_khz * bus_bits / 8 / 1e6,
    )
