"""Names of dtypes: torch's, those of the command line, and the hosts' for KV caches of 8 bits."""

DTYPE_BYTES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element of the KV cache, by its dtype."""

SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Names of dtypes on the command line."""

EIGHT_BIT_CACHES = {
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
"""Hosts' names for KV caches of 8 bits with one scale for all keys and one for all values, and
torch's names for their dtypes."""
