"""Kernels: stage 1 (partial attention) and stage 2 (reduction) in Triton."""

from deft_backend.kernels.both_stages import run_plan
from deft_backend.kernels.configurations import (
    DTYPES,
    EXPONENT_BITS,
    HEAD_DIMS,
    KernelConfiguration,
    kernel_configuration,
    unsupported,
)
from deft_backend.kernels.gpu import Gpu

__all__ = [
    "DTYPES",
    "EXPONENT_BITS",
    "HEAD_DIMS",
    "Gpu",
    "KernelConfiguration",
    "kernel_configuration",
    "run_plan",
    "unsupported",
]
