"""Choose the cost table for a GPU and a head shape: the one from `deft tune`, or the shipped one.

A tuned table is a JSON file in a folder of the user's cache. Its name and its ``key`` identify the
measurement. Another GPU, another version or another head shape has another file.
"""

import json
import logging
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from deft_backend.compile.kernel_folder import digest_of
from deft_backend.costs.cost_model import CostModel, CostModelError
from deft_backend.costs.tables import (
    GpuFacts,
    TableKey,
    gpu_facts,
    nearest_table,
    read_key,
    shipped_for,
)
from deft_backend.files.folders import tables_directory
from deft_backend.files.private_files import write_private
from deft_backend.settings.version import VERSION, installed_version
from deft_backend.shapes import AttentionShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TableInUse:
    """A cost table and the reason for its choice."""

    model: CostModel  # the table to plan with
    path: Path  # the table's file
    tuned: bool  # whether it was measured for this key; False for the shipped table
    # Why the shipped table is used although another would be better, and the remedy.
    notice: str | None = None


def cost_model_for(key: TableKey, folder: Path, facts: GpuFacts | None = None) -> CostModel:
    """The cost table to plan with; one log line warns if a better table should be used."""
    table = table_in_use(key, folder, facts)
    if table.notice is not None:
        _warn_once(table.notice)
    logger.debug("deft: cost table %s", table.path)
    return table.model


def table_in_use(key: TableKey, folder: Path, facts: GpuFacts | None = None) -> TableInUse:
    """The tuned table of `key` in `folder`; without one, the nearest shipped table.

    A shipped table is carried to the GPU of `facts` and scaled to the head shape of `key`.
    """
    path = folder / key.file_name
    notice = None
    if key.gpu:
        try:
            if path.exists() or path.is_symlink():
                if read_key(path, private=True) != key:
                    raise CostModelError(
                        f"cost table {path}: its key is another one than its name says"
                    )
                return TableInUse(CostModel.load(path, private=True), path, tuned=True)
        except (OSError, CostModelError) as error:
            damage = str(error)
            if isinstance(error, OSError):  # no permission to enter the folder
                damage = f"cost table {path}: {error.strerror or error}"
            notice = f"{damage}; the file is ignored. {key.command} measures it again"
    shipped = nearest_table(key, facts)
    if key.gpu and notice is None and key.gpu != shipped.key.gpu:
        derived = "it is used as it is, because the driver does not tell this GPU's clocks"
        if facts is not None:
            derived = f"its times are carried to {facts}"
        notice = (
            f"planning with the cost table of an {shipped.key.gpu}: none was measured on this "
            f"{key.gpu} for {key.shape}; {derived}. To measure one: {key.command}"
        )
    return TableInUse(shipped_for(key, facts), shipped.path, tuned=False, notice=notice)


def save_table(model: CostModel, key: TableKey, path: Path) -> None:
    """Write a table with its key; a reader of `path` sees either the old file or the new one.

    Raises OSError if the folder cannot be created or written.
    """
    text = json.dumps({**model.to_dict(), "key": asdict(key)}, indent=2) + "\n"
    write_private(path, text)


@lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    logger.warning("deft: %s", message)


def table_key(shape: AttentionShape) -> TableKey:
    """Key of the cost table for an attention, with the installed versions."""
    device = shape.device
    return TableKey(
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        package=VERSION,
        kernels=kernels_digest(),
        torch=torch.__version__,
        triton=installed_version("triton") or "unknown",
        query_heads=shape.num_query_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=str(shape.kv_dtype).removeprefix("torch."),
        page_size=shape.page_size,
    )


def cost_model_on(shape: AttentionShape) -> CostModel:
    """The cost table to plan with on the shape's device, with the log of :func:`cost_model_for`."""
    return cost_model_for(table_key(shape), tables_directory(), gpu_facts(shape.device))


def shipped_on(shape: AttentionShape) -> CostModel:
    """The shipped table for the shape's device: the same on every machine with this GPU."""
    return shipped_for(table_key(shape), gpu_facts(shape.device))


@lru_cache(maxsize=1)
def kernels_digest() -> str:
    """Digest of the sources that decide an item's time: the kernels and their limits."""
    return digest_of(["kernels", "shapes.py", "planner/encoding.py"])[:16]
