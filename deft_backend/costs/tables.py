"""Cost tables: what they were measured with, and those that the package ships for other GPUs."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deft_backend.costs.cost_model import (
    DEFAULT_TABLE,
    TABLES,
    CostModel,
    CostModelError,
    default_cost_model,
    read_table,
)
from deft_backend.files.json_fields import shown
from deft_backend.shapes import DTYPE_BYTES, EIGHT_BIT_CACHES, SHORT_DTYPES

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GpuFacts:
    sms: int  # streaming multiprocessors
    sm_clock_mhz: float  # highest clock of an SM, in MHz
    # Bandwidth of the memory by its clock and its bus, in 1e9 bytes per second. No kernel reads as
    # fast; a cost table holds what one reads.
    memory_gb_s: float

    def __str__(self) -> str:
        clock, memory = f"{self.sm_clock_mhz:.0f} MHz", f"{self.memory_gb_s:.0f} GB/s"
        return f"{self.sms} SMs at {clock} and a memory of {memory}"


def gpu_facts(device: torch.device) -> GpuFacts | None:
    """The facts of a CUDA device; None for the CPU, and for a driver that does not tell them."""
    if device.type != "cuda":
        return None
    import torch  # reading a shipped table needs none of it

    properties: Any = torch.cuda.get_device_properties(device)
    clock_khz = getattr(properties, "clock_rate", 0)
    memory_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    if min(clock_khz, memory_khz, bus_bits) <= 0:  # a part of a GPU, or a virtual one
        return None
    # Two transfers a clock, eight bits a byte.
    return GpuFacts(
        sms=properties.multi_processor_count,
        sm_clock_mhz=clock_khz / 1e3,
        memory_gb_s=2 * memory_khz * bus_bits / 8 / 1e6,
    )


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
    # Of the KV cache: one of :data:`~deft_backend.shapes.DTYPE_BYTES`. Queries have it
    # too, unless it has 8 bits.
    dtype: str
    page_size: int  # tokens a page of the KV cache

    @property
    def gqa_group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def shape(self) -> str:
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


SHIPPED_TABLES = (
    DEFAULT_TABLE,
    *(TABLES / f"{name}.json" for name in ("h200", "h200-mha", "h100-fp8", "h200-fp8")),
)
"""The files of the tables: for each GPU that was measured, for caches of 16 and of 8 bits, and for
an H200 without GQA. On the CPU the first one plans."""


@dataclass(frozen=True, eq=False)
class ShippedTable:
    path: Path
    key: TableKey  # what it was measured with
    facts: GpuFacts  # the GPU that it was measured on
    model: CostModel


@lru_cache(maxsize=1)
def shipped_tables() -> tuple[ShippedTable, ...]:
    """Every shipped table, read once."""
    return tuple(_read(path) for path in SHIPPED_TABLES)


def nearest_table(key: TableKey, facts: GpuFacts | None) -> ShippedTable:
    """The shipped table of the key's GPU, else of the GPU most like `facts`; the first if none is
    known.

    Tables of caches whose elements have as many bytes come first. Tiles of 8 bits are
    converted on their way to the tensor cores, so their times do not follow from those of 16 bits.
    Of a GPU's tables, the one measured with the most similar GQA group is taken.

    Two GPUs are alike if an SM has the same share of the memory's bandwidth in each clock. This
    share decides whether an item waits for the memory or for the SM.
    """
    size = DTYPE_BYTES[key.dtype]
    tables = shipped_tables()
    tables = tuple(t for t in tables if DTYPE_BYTES[t.key.dtype] == size) or tables

    def differences(table: ShippedTable) -> tuple[float, float]:
        other = 0.0 if facts is None else abs(math.log(_balance(facts) / _balance(table.facts)))
        same = -1.0 if table.key.gpu == key.gpu else other
        return same, abs(math.log(key.gqa_group / table.key.gqa_group))

    if facts is None and all(table.key.gpu != key.gpu for table in tables):
        tables = tuple(table for table in tables if table.key.gpu == tables[0].key.gpu)
    return min(tables, key=differences)


def derived_table(table: ShippedTable, facts: GpuFacts | None) -> CostModel:
    """A shipped table carried to the GPU of `facts`, in proportion to what the driver tells.

    - The bandwidth follows the memory's.
    - Times of items, of tokens and of the last launch follow an SM's clock.
    - The time of a partial result follows the clock and the number of SMs, which share the work.
    - The time of a launch and FastTree's coefficients stay.
    """
    if facts is None or facts == table.facts:
        return table.model
    model, was = table.model, table.facts
    slower = was.sm_clock_mhz / facts.sm_clock_mhz
    tiles = model.tiles
    return replace(
        model,
        source=f"{model.source}; derived for {facts}",
        time_ms=model.launch_ms + (model.time_ms - model.launch_ms) * slower,
        bandwidth_gb_s=model.bandwidth_gb_s * facts.memory_gb_s / was.memory_gb_s,
        tiles=replace(
            tiles,
            item_ns=tuple(time * slower for time in tiles.item_ns),
            token_ns=tuple(time * slower for time in tiles.token_ns),
            partial_ns=tiles.partial_ns * slower * was.sms / facts.sms,
            reduce_ns=tiles.reduce_ns * slower,
        ),
    )


@lru_cache(maxsize=64)
def shipped_for(key: TableKey, facts: GpuFacts | None = None) -> CostModel:
    """The nearest shipped table, carried to the GPU of `facts` and scaled to the head shape.

    - ``token_ns``, and ``C_est`` beyond its launch, scale with the bytes of a token and KV head:
      ``head_dim`` × bytes of the dtype.
    - ``partial_ns`` scales with the elements of a partial result: query heads × ``head_dim``.
    - The constant times (``item_ns``, ``reduce_ns``, ``launch_ms``) and the bandwidth stay. So do
      FastTree's coefficients, of which only the ratios matter.
    """
    table = nearest_table(key, facts)
    model, measured = derived_table(table, facts), table.key
    element, was = DTYPE_BYTES[key.dtype], DTYPE_BYTES[measured.dtype]
    per_token = key.head_dim * element / (measured.head_dim * was)
    per_result = key.query_heads * key.head_dim / (measured.query_heads * measured.head_dim)
    if per_token == per_result == 1.0 and key.head_dim == measured.head_dim:
        return model
    scaled = f"scaled to {key.query_heads} query heads of {key.head_dim} {key.dtype}"
    return replace(
        model,
        source=f"{model.source}; {scaled}",
        head_dim=key.head_dim,
        time_ms=model.launch_ms + (model.time_ms - model.launch_ms) * per_token,
        tiles=replace(
            model.tiles,
            token_ns=tuple(time * per_token for time in model.tiles.token_ns),
            partial_ns=model.tiles.partial_ns * per_result,
        ),
    )


def _balance(facts: GpuFacts) -> float:
    return facts.memory_gb_s / (facts.sms * facts.sm_clock_mhz)


def _read(path: Path) -> ShippedTable:
    data = json.loads(path.read_text(encoding="utf-8"))
    # The default table is one object everywhere: code compares it by identity.
    model = default_cost_model() if path == DEFAULT_TABLE else CostModel.load(path)
    return ShippedTable(path, read_key(path), GpuFacts(**data["facts"]), model)
