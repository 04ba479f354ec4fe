"""What a state file says about the server that writes it, and how its reader checks each field."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from deft_backend.files.json_fields import text, whole

MOST = (1 << 31) - 1  # largest process id, rank and size of an attention

_TEXT = {"reader": text}
_ID = {"reader": partial(whole, most=MOST)}
_PORT = {"reader": partial(whole, most=65_535)}
_SIZE = {"reader": partial(whole, least=1, most=MOST)}


@dataclass
class ServerDescription:
    """The server process, its versions and settings, and the shape of its attention.

    A field's ``reader`` checks it in a state file that another process may have written.
    """

    pid: int = field(default_factory=os.getpid, kw_only=True, metadata=_ID)
    port: int = field(metadata=_PORT)
    rank: int = field(metadata=_ID)  # Tensor-parallel rank
    host: str = field(metadata=_TEXT)
    host_version: str = field(metadata=_TEXT)
    backend: str = field(metadata=_TEXT)
    policy: str = field(metadata=_TEXT)
    device: str = field(metadata=_TEXT)
    # Of the KV cache. Queries have it too, unless it has 8 bits.
    dtype: str = field(metadata=_TEXT)
    num_layers: int = field(metadata=_SIZE)
    num_query_heads: int = field(metadata=_SIZE)
    num_kv_heads: int = field(metadata=_SIZE)
    head_dim: int = field(metadata=_SIZE)
    dtype_bytes: int = field(metadata=_SIZE)  # bytes of one element of the KV cache

    def description(self) -> dict[str, Any]:
        """These fields, as a state file holds them."""
        return {each.name: getattr(self, each.name) for each in fields(ServerDescription)}


def read_description(content: Mapping[str, Any]) -> dict[str, Any]:
    """These fields of a state file; raises FieldError if one is missing or impossible."""
    return {
        each.name: each.metadata["reader"](content, each.name) for each in fields(ServerDescription)
    }
