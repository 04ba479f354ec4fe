"""The device planner: page tables to Plan on the GPU, in the order in which its kernels run.

``compare_rows`` → ``sort_rows`` → ``find_nodes`` → ``choose_ranges`` → ``price_chunks`` →
``measure_ranges`` → ``write_plan``. The CPU reads nothing back, so a CUDA graph can hold the
kernels. Each step plans anew, so no plan can be stale.
"""

from deft_backend.planner.on_device.arrays import new_counters
from deft_backend.planner.on_device.launch_numbers import SIZES, largest_batch
from deft_backend.planner.on_device.planner import DevicePlanner

__all__ = ["SIZES", "DevicePlanner", "largest_batch", "new_counters"]
