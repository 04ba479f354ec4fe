"""The target of a running server's plans, as another process can know it."""

from deft_backend.policies import Target
from deft_backend.telemetry.state_reader import StateReading

H100_SMS = 132
_BLOCKS_AN_SM = 2


def server_target(state: StateReading, page_size: int) -> Target:
    """The target that the server itself plans for, if this machine has its device."""
    import torch

    from deft_backend.attention.device_target import target_of
    from deft_backend.kernels import kernel_configuration
    from deft_backend.shapes.attention_shape import AttentionShape

    heads, kv_heads, head_dim = state.num_query_heads, state.num_kv_heads, state.head_dim
    on_cpu = state.device.startswith("cpu")
    if not on_cpu and not torch.cuda.is_available():
        return reference_target(heads, kv_heads, head_dim, state.dtype_bytes)
    kv_dtype = getattr(torch, state.dtype.removeprefix("torch."))
    # A plan does not depend on which 16 bits the queries have.
    dtype = torch.bfloat16 if kv_dtype.itemsize == 1 else kv_dtype
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    shape = AttentionShape(heads, kv_heads, head_dim, dtype, kv_dtype, device, page_size)
    config = kernel_configuration(head_dim, dtype, device, shape.gqa_group, kv_dtype=kv_dtype)
    return target_of(config, shape)


def reference_target(query_heads: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> Target:
    """The target of one H100, so that an explanation is the same on every machine."""
    programs = max(1, H100_SMS * _BLOCKS_AN_SM // kv_heads)
    return Target(query_heads, kv_heads, head_dim, dtype_bytes, num_programs=programs)
