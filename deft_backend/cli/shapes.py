"""Head shapes as a command is given them: words, or a checkpoint's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from deft_backend.cli.errors import fail
from deft_backend.costs.table_lookup import SHORT_DTYPES


class HeadShape(NamedTuple):
    """An attention: heads, elements a head, and its dtype by torch's name."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str


def parse_heads(heads: str) -> tuple[int, int]:
    """``32/8`` as query heads and KV heads."""
    try:
        query_heads, kv_heads = (int(part) for part in heads.split("/"))
        if min(query_heads, kv_heads) < 1:
            raise ValueError
    except ValueError:
        raise fail(f"--heads is {heads!r}; expected QUERY/KV such as 32/8") from None
    return query_heads, kv_heads


def model_shape(model: Path) -> HeadShape:
    """The attention of a checkpoint, from its ``config.json``."""
    path = model / "config.json"
    try:
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        query_heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or query_heads)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // query_heads)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float16")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise fail(f"cannot read the attention's shape from {path}: {error!r}") from None
    if dtype not in SHORT_DTYPES.values():
        raise fail(
            f"{path}: dtype is {dtype!r}; expected one of {', '.join(SHORT_DTYPES.values())}"
        )
    return HeadShape(query_heads, kv_heads, head_dim, dtype)
