"""Choose the cost table for a GPU and a head shape: the one from `deft tune`, or the shipped one.

A tuned table is a JSON file in a folder of the user's cache. Its name and its ``key`` identify the
measurement. Another GPU, another version or another head shape has another file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from deft_backend.costs.cost_model import (
    DEFAULT_TABLE,
    CostModel,
    CostModelError,
    default_cost_model,
)

logger = logging.getLogger(__name__)

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Names of dtypes on the command line."""


@dataclass(frozen=True)
class TableKey:
    """The conditions of a cost table's measurement; the table is valid for these only.

    Attributes
    ----------
    gpu : str
        Name of the GPU; empty for the CPU, which is never measured.
    package, kernels, torch, triton : str
        Version of this package, digest of its kernels' sources, versions of torch and Triton.
    query_heads, kv_heads, head_dim : int
        Shape of the attention.
    dtype : str
        Dtype of queries and KV cache: one of :data:`DTYPE_BYTES`.
    page_size : int
        Tokens of a page of the KV cache.
    """

    gpu: str
    package: str
    kernels: str
    torch: str
    triton: str
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int

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
        short = {long: name for name, long in SHORT_DTYPES.items()}
        return (
            f"deft tune --heads {self.query_heads}/{self.kv_heads} --head-dim {self.head_dim} "
            f"--dtype {short[self.dtype]} --page-size {self.page_size}"
        )

    @property
    def file_name(self) -> str:
        """Name of the table's file; it is readable, and different for every key."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]
        gpu = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        heads = f"{self.query_heads}x{self.kv_heads}-d{self.head_dim}"
        return f"{gpu}-{heads}-{self.dtype}-p{self.page_size}-{digest}.json"


@dataclass(frozen=True, eq=False)
class TableInUse:
    """A cost table and the reason for its choice.

    Attributes
    ----------
    model : CostModel
        The table to plan with.
    path : Path
        The table's file.
    tuned : bool
        Whether it was measured for this key; False for the shipped table.
    notice : str, optional
        Why the shipped table is used although another would be better, and the remedy.
    damage : str, optional
        The fault of the file that should have been used.
    """

    model: CostModel
    path: Path
    tuned: bool
    notice: str | None = None
    damage: str | None = None


def cost_model_for(key: TableKey, folder: Path) -> CostModel:
    """The cost table to plan with; one log line warns if a better table should be used."""
    found = table_in_use(key, folder)
    if found.damage is not None:
        _warn_once(found.damage)
    if found.notice is not None:
        _warn_once(found.notice)
    logger.debug("deft: cost table %s", found.path)
    return found.model


def table_in_use(key: TableKey, folder: Path) -> TableInUse:
    """The tuned table of `key` in `folder`; without one, the shipped table for its head shape."""
    path = folder / key.file_name
    damage = None
    if key.gpu:
        try:
            if path.exists():
                if read_key(path) == key:
                    return TableInUse(CostModel.load(path), path, tuned=True)
                damage = f"cost table {path}: its key is another one than its name says"
        except OSError as error:  # no permission to enter the folder
            damage = f"cost table {path}: {error.strerror or error}"
        except CostModelError as error:
            damage = str(error)
        if damage is not None:
            damage = f"deft: {damage}; the file is ignored. {key.command} measures it again"
    notice = None
    if key.gpu and "H100" not in key.gpu and damage is None:
        notice = (
            f"deft: planning with the cost table shipped for {read_key(DEFAULT_TABLE).gpu}: none "
            f"was measured on this {key.gpu} for {key.shape}. For faster plans: {key.command}"
        )
    model = shipped_for(key.query_heads, key.head_dim, key.dtype)
    return TableInUse(model, DEFAULT_TABLE, tuned=False, notice=notice, damage=damage)


@lru_cache(maxsize=64)
def shipped_for(query_heads: int, head_dim: int, dtype: str) -> CostModel:
    """The shipped table, scaled from the head shape that it was measured for.

    Times that grow with the context (``C_est`` beyond its launch, ``token_ns``) are scaled by the
    bytes of a token and KV head: ``head_dim`` × bytes of the dtype. ``partial_ns`` is scaled by the
    elements of a partial result: query heads × ``head_dim``. The fixed times of an item or a launch
    (``item_ns``, ``reduce_ns``, ``launch_ms``) and the bandwidth stay the same. So do FastTree's
    coefficients, because only their ratios matter.
    """
    model, measured = default_cost_model(), read_key(DEFAULT_TABLE)
    per_token = head_dim * DTYPE_BYTES[dtype] / (measured.head_dim * DTYPE_BYTES[measured.dtype])
    per_result = query_heads * head_dim / (measured.query_heads * measured.head_dim)
    if per_token == per_result == 1.0 and head_dim == measured.head_dim:
        return model
    return replace(
        model,
        source=f"{model.source}; scaled to {query_heads} query heads of {head_dim} {dtype}",
        head_dim=head_dim,
        time_ms=model.launch_ms + (model.time_ms - model.launch_ms) * per_token,
        tiles=replace(
            model.tiles,
            token_ns=tuple(time * per_token for time in model.tiles.token_ns),
            partial_ns=model.tiles.partial_ns * per_result,
        ),
    )


def save_table(model: CostModel, key: TableKey, path: Path) -> None:
    """Write a table with its key; a reader of `path` sees either the old file or the new one.

    Raises
    ------
    OSError
        If the folder cannot be created or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**model.to_dict(), "key": asdict(key)}, indent=2) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp creates files that only this user can read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_key(path: Path) -> TableKey:
    """The key in a table's file.

    Raises
    ------
    CostModelError
        If the file cannot be read or holds no key.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CostModelError(f"cost table {path}: {error.strerror}; expected a file") from error
    except ValueError as error:
        raise CostModelError(f"cost table {path} is no JSON: {error}") from error
    key = data.get("key") if isinstance(data, Mapping) else None
    names = {field.name for field in fields(TableKey)}
    if not isinstance(key, Mapping) or set(key) != names:
        raise CostModelError(f"cost table {path}: key is {key!r}; expected {', '.join(names)}")
    return TableKey(**key)


@lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
