"""Kernels: stage 1 (partial attention) and stage 2 (reduction) in Triton."""

from deft_backend.kernels.arguments import Partials
from deft_backend.kernels.both_stages import Step, run_plan
from deft_backend.kernels.configurations import (
    DTYPES,
    EXPONENT_BITS,
    HEAD_DIMS,
    KernelConfiguration,
    kernel_configuration,
    unsupported,
)
from deft_backend.kernels.gpu import Gpu
from deft_backend.kernels.layer_launches import LayerLaunches

__all__ = [
    "DTYPES",
    "EXPONENT_BITS",
    "HEAD_DIMS",
    "Gpu",
    "KernelConfiguration",
    "LayerLaunches",
    "Partials",
    "Step",
    "kernel_configuration",
    "run_plan",
    "unsupported",
]
