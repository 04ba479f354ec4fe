"""Profiled costs of partial attention: FlashForge's C_est, and FastTree's coefficients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deft_backend.files.json_fields import (
    FieldError,
    mapping,
    number,
    numbers,
    shown,
    text,
    whole,
    within,
)
from deft_backend.files.private_files import parsed, read_private_json

FloatArray = npt.NDArray[np.float64]

TABLE_FORMAT = 2  # version of the JSON files that :meth:`CostModel.load` reads

TABLES = Path(__file__).parent / "shipped"

DEFAULT_TABLE = TABLES / "h100.json"
"""The table that policies plan with by default: this package's kernels on an H100."""

SMALLEST_MS = 1e-6
"""Least estimated time in milliseconds: an extrapolation below the table must not reach 0."""


class CostModelError(ValueError):
    """The cost table is unusable; the message names the field and the expected value."""


@dataclass(frozen=True)
class FastTreeCoefficients:
    """FastTree's empirical weights of padding and intermediate results on a GPU.

    `alpha` weighs padded queries, `beta` padded context, `gamma` intermediate results.
    """

    alpha: float
    beta: float
    gamma: float


@dataclass(frozen=True, eq=False)
class CostModel:
    """Execution times of partial attention, profiled on one GPU (FlashForge, section 5.2)."""

    source: str  # origin of the times
    head_dim: int  # profiled head dimension
    # [Q] float64: profiled heights ``n_q`` of the query tile in query vectors, ascending. Each
    # query has one vector for each query head of its GQA group, so one table serves MHA, GQA and
    # MQA.
    query_rows: FloatArray
    tokens: FloatArray  # [T] float64: profiled KV lengths ``n``, ascending
    # [T, Q] float64: milliseconds of a program (thread block); more tokens never take less time.
    time_ms: FloatArray
    # Part of every time that the kernel launch takes, regardless of its work. A launch runs many
    # items, so estimates of a whole grouping count it once.
    launch_ms: float
    # Bandwidth of the GPU's memory in 1e9 bytes per second. All programs share it; the times of one
    # program do not show this.
    bandwidth_gb_s: float
    fasttree: FastTreeCoefficients  # weights of FastTree's cost equations on this GPU
    tiles: TileCosts  # times of items and partial results on the whole GPU

    def __post_init__(self) -> None:
        for name, axis in (("query_rows", self.query_rows), ("tokens", self.tokens)):
            steps = np.diff(axis, prepend=0.0)
            if len(axis) < 2 or not np.isfinite(axis).all() or (steps <= 0).any():
                raise CostModelError(
                    f"{name} is {axis.tolist()}; expected 2 or more positive, ascending numbers"
                )
        expected = (len(self.tokens), len(self.query_rows))
        if self.time_ms.shape != expected:
            raise CostModelError(
                f"time_ms has shape {self.time_ms.shape}; expected {expected}, one row for each of "
                "tokens and one column for each of query_rows"
            )
        if not np.isfinite(self.time_ms).all() or (self.time_ms <= 0).any():
            raise CostModelError("time_ms holds a time that is not positive")
        if (np.diff(self.time_ms, axis=0) < 0).any():
            token, rows = np.argwhere(np.diff(self.time_ms, axis=0) < 0)[0]
            raise CostModelError(
                f"time_ms falls from {self.tokens[token]:g} to {self.tokens[token + 1]:g} tokens "
                f"at {self.query_rows[rows]:g} query rows; expected times that never fall"
            )
        for name, value in (("launch_ms", self.launch_ms), *vars(self.fasttree).items()):
            if not math.isfinite(value) or value < 0:
                raise CostModelError(f"{name} is {value}; expected a number of 0 or more")
        if not math.isfinite(self.bandwidth_gb_s) or self.bandwidth_gb_s <= 0:
            raise CostModelError(
                f"bandwidth_gb_s is {self.bandwidth_gb_s}; expected a number above 0"
            )

    def time(self, query_rows: npt.ArrayLike, tokens: npt.ArrayLike) -> FloatArray:
        """C_est(n_q, n): milliseconds of partial attention (FlashForge, equation 6).

        Exact at profiled points, bilinear between them, linear beyond them. Arguments broadcast.
        """
        rows, length = np.broadcast_arrays(
            np.asarray(query_rows, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
        )
        t, in_t = _locate(self.tokens, length)
        q, in_q = _locate(self.query_rows, rows)
        below = self.time_ms[t, q] * (1 - in_q) + self.time_ms[t, q + 1] * in_q
        above = self.time_ms[t + 1, q] * (1 - in_q) + self.time_ms[t + 1, q + 1] * in_q
        return np.maximum(SMALLEST_MS, below * (1 - in_t) + above * in_t)

    def transfer_ms(self, num_bytes: float) -> float:
        """Milliseconds in which the GPU's memory moves `num_bytes`."""
        return num_bytes / (self.bandwidth_gb_s * 1e6)

    @classmethod
    def load(cls, path: str | Path, *, private: bool = False) -> CostModel:
        """Read a table from JSON, as :meth:`to_dict` writes it.

        - `private`: whether only this user or root may be able to write the file; the package's own
          tables may belong to others.

        Raises CostModelError if the file is missing or holds no JSON, or if a field is missing or
        impossible.
        """
        data = read_table(Path(path), private=private)
        try:
            return cls._from_dict(data)
        except (CostModelError, FieldError) as error:
            raise CostModelError(f"cost table {path}: {error}") from error

    @classmethod
    def _from_dict(cls, data: Any) -> CostModel:
        if not isinstance(data, Mapping):
            raise CostModelError(f"it holds a {type(data).__name__}; expected an object")
        if data.get("format") != TABLE_FORMAT:
            raise CostModelError(f"format is {shown(data.get('format'))}; expected {TABLE_FORMAT}")
        weights, costs = mapping(data, "fasttree"), mapping(data, "tiles")
        with within("fasttree"):
            names = (each.name for each in fields(FastTreeCoefficients))
            fasttree = FastTreeCoefficients(*(number(weights, name) for name in names))
        with within("tiles"):
            tiles = TileCosts(
                item_ns=tuple(numbers(costs, "item_ns").tolist()),
                token_ns=tuple(numbers(costs, "token_ns").tolist()),
                partial_ns=number(costs, "partial_ns"),
                reduce_ns=number(costs, "reduce_ns"),
            )
        return cls(
            source=text(data, "source") if "source" in data else "unknown",
            head_dim=whole(data, "head_dim", least=1),
            query_rows=numbers(data, "query_rows"),
            tokens=numbers(data, "tokens"),
            time_ms=numbers(data, "time_ms", dimensions=2),
            launch_ms=number(data, "launch_ms"),
            bandwidth_gb_s=number(data, "bandwidth_gb_s"),
            fasttree=fasttree,
            tiles=tiles,
        )

    def to_dict(self) -> dict[str, Any]:
        content = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in asdict(self).items()
        }
        return {"format": TABLE_FORMAT, **content}


def read_table(path: Path, *, private: bool) -> Any:
    """The JSON of a table's file.

    Raises CostModelError if it cannot be read, holds no JSON or, with `private`, might be another
    user's work.
    """
    try:
        return read_private_json(path) if private else parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CostModelError(f"cost table {path}: {error.strerror}; expected a file") from error
    except ValueError as error:
        raise CostModelError(f"cost table {path} is not JSON: {error}") from error


@lru_cache(maxsize=1)
def default_cost_model() -> CostModel:
    """The table shipped with the package, read once."""
    return CostModel.load(DEFAULT_TABLE)


def _locate(axis: FloatArray, at: FloatArray) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Cell of `axis` for each value, and the position in it: 0 … 1 inside the table."""
    cell = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, len(axis) - 2)
    return cell, (at - axis[cell]) / (axis[cell + 1] - axis[cell])


@dataclass(frozen=True)
class TileCosts:
    """Times of items and partial results, in nanoseconds, as `deft tune` measures them.

    An item of tile shape ``t`` with ``n`` KV tokens takes ``item_ns[t] + n * token_ns[t]``, while
    every program of that shape is busy.
    """

    # For the small tile and the large tile: the time of an item, and of one KV token of one KV
    # head.
    item_ns: tuple[float, ...]
    token_ns: tuple[float, ...]
    partial_ns: float  # time of the whole GPU to write and merge one partial result, all heads
    reduce_ns: float  # time of the launch of stage 2

    def __post_init__(self) -> None:
        if len(self.item_ns) != len(self.token_ns) or not self.item_ns:
            raise ValueError(
                f"item_ns has {len(self.item_ns)} entries and token_ns {len(self.token_ns)}; "
                "expected one for each tile shape in both"
            )
        for name, values in vars(self).items():
            for value in values if isinstance(values, tuple) else (values,):
                if not math.isfinite(value) or value <= 0:
                    raise ValueError(f"{name} holds {value}; expected numbers above 0")


# MLA by the host's kernel: the times are those of the whole GPU, for FlashAttention-3 in bfloat16
# on an H100 (docs/results/mla-h100.json). A tile takes the same time for any number of query
# vectors, so both tile shapes have the same costs. `LatentAttention.loses` decides with them.

TOKEN_NS = 0.19  # a tile reads and computes one KV token

ITEM_NS = 20.0  # a tile begins and ends

HEAD_NS = 2.0  # one head's partial result of a query is written, read and merged

LAUNCH_NS = 14000.0  # the launches that gather queries and merge results, in each layer

# A second call for leaves, in each layer, if a request has several query tokens.
LEAVES_NS = 33000.0

STEP_NS = 700_000.0
"""What a server's step takes longer over a plan, apart from its layers. The first end-to-end run
(docs/results/e2e-sglang-mla-h200.json) bounds it: with 8 layers, kernels that save 0.5 ms a step
made the server slower, and kernels that save 1.1 ms made it faster."""

MARGIN = 1.2  # a plan must save so many times its costs, which may be wrong by a fifth


def latent_costs(num_query_heads: int) -> CostModel:
    """The cost model of the host's MLA kernel for so many heads of a rank."""
    tiles = TileCosts(
        (ITEM_NS, ITEM_NS), (TOKEN_NS, TOKEN_NS), HEAD_NS * num_query_heads, LAUNCH_NS
    )
    return replace(default_cost_model(), source="FlashAttention-3, MLA", tiles=tiles)
