"""The key of a cost table: an A100 with the heads of Llama-3-8B."""

from deft_backend.costs.tables import TableKey

KEY = TableKey(
    gpu="NVIDIA A100-SXM4-40GB",
    package="1.2.3",
    kernels="0123",
    torch="2.11.0",
    triton="3.6.0",
    query_heads=32,
    kv_heads=8,
    head_dim=128,
    dtype="float16",
    page_size=1,
)
