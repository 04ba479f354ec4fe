"""GPUs that nobody has run the kernels on; servers there check themselves.

Tests compile every kernel for their compute capability, and check that it fits their memory.
"""

COMPILED = {
    "A100, A30": "sm_80",
    "A10, A40, RTX 30": "sm_86",
    "L4, L40S, RTX 40": "sm_89",
    "B200, GB200": "sm_100",
    "RTX 50, RTX PRO": "sm_120",
}
