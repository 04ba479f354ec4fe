"""Kernels: stage 1 (partial attention) and stage 2 (reduction) in Triton."""

from deft_backend.kernels.launch import (
    DTYPES,
    HEAD_DIMS,
    LaunchConfig,
    launch_config,
    unsupported,
)
from deft_backend.kernels.tree_attention import run_plan

__all__ = ["DTYPES", "HEAD_DIMS", "LaunchConfig", "launch_config", "run_plan", "unsupported"]
