"""One attention under one method, between the profiler's start and stop: what `ncu` counts.

``python -m benchmarks.papers.one_launch METHOD TREE HEADS``
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.kernel.case_inputs import make_inputs
from benchmarks.kernel.methods import make_method
from benchmarks.kernel.tree_workloads import cases_of, described, parse_heads


def main(method: str, tree: str, heads: str) -> None:
    """Prepare and compile everything first, so that only the attention's kernels are counted."""
    (case,) = cases_of([described(tree)], [parse_heads(heads)], 0)
    inputs = make_inputs(case, 128, torch.bfloat16, None, torch.device("cuda"))
    launch = make_method(method).prepare(inputs).launch
    launch()
    torch.cuda.synchronize()
    profiler: Any = torch.cuda.profiler
    profiler.start()
    launch()
    torch.cuda.synchronize()
    profiler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
