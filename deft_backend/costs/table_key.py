"""What a cost table was measured with: the key in its file, and the file's name."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from deft_backend.costs.cost_model import CostModelError, read_table
from deft_backend.files.json_fields import shown
from deft_backend.shapes.dtype_names import EIGHT_BIT_CACHES, SHORT_DTYPES


@dataclass(frozen=True)
class TableKey:
    """The GPU, software and attention for which a cost table was measured."""

    gpu: str  # name of the GPU; empty for the CPU, where nothing is measured
    # Version of this package, digest of its kernels' sources, versions of torch and Triton.
    package: str
    kernels: str
    torch: str
    triton: str
    # Shape of the attention.
    query_heads: int
    kv_heads: int
    head_dim: int
    # Of the KV cache: one of :data:`~deft_backend.shapes.dtype_names.DTYPE_BYTES`. Queries have it
    # too, unless it has 8 bits.
    dtype: str
    page_size: int  # tokens a page of the KV cache

    @property
    def shape(self) -> str:
        """The attention in words."""
        return (
            f"heads {self.query_heads}/{self.kv_heads}, head dimension {self.head_dim}, "
            f"{self.dtype}, page size {self.page_size}"
        )

    @property
    def command(self) -> str:
        """The command that measures the table."""
        option = "--kv-cache-dtype" if self.dtype in EIGHT_BIT_CACHES.values() else "--dtype"
        short = {long: name for name, long in (SHORT_DTYPES | EIGHT_BIT_CACHES).items()}
        return (
            f"deft tune --heads {self.query_heads}/{self.kv_heads} --head-dim {self.head_dim} "
            f"{option} {short[self.dtype]} --page-size {self.page_size}"
        )

    @property
    def file_name(self) -> str:
        """Name of the table's file: readable, and different for every key."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]
        gpu = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        heads = f"{self.query_heads}x{self.kv_heads}-d{self.head_dim}"
        return f"{gpu}-{heads}-{self.dtype}-p{self.page_size}-{digest}.json"


def read_key(path: Path, *, private: bool = False) -> TableKey:
    """The key in a table's file; `private` as in :meth:`CostModel.load`.

    Raises CostModelError if the file cannot be read or holds no key.
    """
    data = read_table(path, private=private)
    key = data.get("key") if isinstance(data, Mapping) else None
    names = {field.name for field in fields(TableKey)}
    if not isinstance(key, Mapping) or set(key) != names:
        raise CostModelError(
            f"cost table {path}: key is {shown(key)}; expected an object with "
            f"{', '.join(sorted(names))}"
        )
    return TableKey(**key)
