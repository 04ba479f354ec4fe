"""The library: plan a batch once, then run its decode attention for every layer and step."""

from deft_backend.attention.checks import AttentionError
from deft_backend.attention.latent_attention import LatentAttention
from deft_backend.attention.planned_attention import PlannedAttention
from deft_backend.attention.tree_attention import TreeAttention
from deft_backend.kernels import HEAD_DIMS, Gpu, LayerAddresses, layer_addresses
from deft_backend.kernels.latent import LatentCall, LatentKernel, plain_latent_attention
from deft_backend.planner import PlanError

__all__ = [
    "HEAD_DIMS",
    "AttentionError",
    "Gpu",
    "LatentAttention",
    "LatentCall",
    "LatentKernel",
    "LayerAddresses",
    "PlanError",
    "PlannedAttention",
    "TreeAttention",
    "layer_addresses",
    "plain_latent_attention",
]
