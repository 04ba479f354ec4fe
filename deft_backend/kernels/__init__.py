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
from deft_backend.kernels.layer_launches import LayerAddresses, LayerLaunches, layer_addresses

__all__ = [
    "DTYPES",
    "EXPONENT_BITS",
    "HEAD_DIMS",
    "Gpu",
    "KernelConfiguration",
    "LayerAddresses",
    "LayerLaunches",
    "Partials",
    "Step",
    "kernel_configuration",
    "layer_addresses",
    "run_plan",
    "unsupported",
]
