"""Where recorded results exist: kinds of GPU, and the Triton and torch that ran on each.

A server on anything else checks its kernels itself before it captures graphs (`self_check`). The
records lie in `docs/results`. Add a line here together with its record.
"""

import torch
import triton

RECORDED = {
    "H100": {("3.6", "2.11"), ("3.7", "2.13"), ("3.8", "2.14")},
    "H200": {("3.6", "2.11"), ("3.8", "2.14")},
}
"""By a word of the GPU's name: minor versions of Triton and of torch that decoded there."""

COMPILED = {
    "A100, A30": "sm_80",
    "A10, A40, RTX 30": "sm_86",
    "L4, L40S, RTX 40": "sm_89",
    "B200, GB200": "sm_100",
    "RTX 50, RTX PRO": "sm_120",
}
"""GPUs that nobody has run the kernels on. Tests compile every kernel for their compute capability,
and check that it fits their shared memory. Servers there check themselves."""


def unrecorded(gpu_name: str) -> str | None:
    """What has no recorded result here, in a few words; None if this GPU kind, Triton and torch
    have one."""
    kind = next((kind for kind in RECORDED if kind in gpu_name.split()), None)
    if kind is None:
        return gpu_name
    versions = _minor(triton.__version__), _minor(torch.__version__)
    if versions in RECORDED[kind]:
        return None
    return f"{kind} with Triton {versions[0]} and torch {versions[1]}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
