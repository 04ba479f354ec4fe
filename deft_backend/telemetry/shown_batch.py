"""Show the last batch's forest on request: ``deft explain --server`` asks by a file."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deft_backend.files.json_fields import FieldError, whole, whole_numbers
from deft_backend.forest import ForestError, PrefixForest, build_forest, forest_from_page_tables

if TYPE_CHECKING:
    import torch


LIMIT = 1 << 26  # copy at most this many page ids of a batch: 256 MiB


class ShownBatchError(ValueError):
    """There is no batch to show, or it is too large."""


class Batch(NamedTuple):
    page_table: torch.Tensor  # [rows, P] int; Page ids, on the device
    seq_lens: torch.Tensor  # [B] int; tokens of each request, on the device
    page_size: int
    # [B] int; Row of the page table of each request; None: row ``b``.
    table_rows: torch.Tensor | None = None


def request_file(state: Path) -> Path:
    return state.with_suffix(".wanted")


def answer_file(state: Path) -> Path:
    return state.with_suffix(".batch.json")


def answer(batch: Batch | str | None) -> dict[str, Any]:
    try:
        return {"forest": forest_as_json(forest_of(batch))}
    except Exception as error:  # the answer says so; the server goes on
        return {"error": f"{type(error).__name__}: {error}"}


def forest_of(batch: Batch | str | None) -> PrefixForest:
    """Copy a batch from the device, as it is at this moment, and find what its requests share."""
    if batch is None:
        raise ShownBatchError("no batch has been planned on the device yet")
    if isinstance(batch, str):
        raise ShownBatchError(batch)
    device = batch.seq_lens.device
    if device.type != "cuda":
        return _forest(batch)
    import torch  # not at the top: the command that asks needs no torch

    _allow_copies_during_captures()
    # On a stream of its own: neither the server's forward nor this copy waits for the other.
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        return _forest(batch)


def _allow_copies_during_captures() -> None:
    """Let this thread call CUDA while another thread captures a graph.

    PyTorch captures in the mode "global": a call from another thread may end the capture with an
    error. This thread chooses the mode "relaxed" for itself, which allows its calls (CUDA driver
    API, ``cuThreadExchangeStreamCaptureMode``).
    """
    relaxed = ctypes.c_int(2)
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def _forest(batch: Batch) -> PrefixForest:
    lens = batch.seq_lens.cpu().numpy()
    rows = np.arange(len(lens)) if batch.table_rows is None else batch.table_rows.cpu().numpy()
    # A request that decodes has at least two tokens; a padding request has fewer.
    shown = np.flatnonzero(lens > 1)
    if not len(shown):
        raise ShownBatchError("the last batch had no requests")
    pages = -(-lens[shown].astype(np.int64) // batch.page_size)
    if len(shown) * int(pages.max()) > LIMIT:
        raise ShownBatchError(
            f"{len(shown)} requests of up to {int(pages.max())} pages are too many to copy; "
            f"expected at most {LIMIT} page ids"
        )
    # Row by row: a gather on the device would take memory that the server has planned for.
    table = np.zeros((len(shown), int(pages.max())), dtype=np.int64)
    for at, request in enumerate(shown):
        used = batch.page_table[int(rows[request]), : int(pages[at])]
        table[at, : pages[at]] = used.cpu().numpy()
    # Do not check that equality is monotone: see "Equal blocks" in docs/hosts-vllm.md.
    return forest_from_page_tables(table, lens[shown], batch.page_size, check=False)


_ARRAYS = ("order", "shared", "seq_lens")  # they describe a forest: its nodes follow from them


def forest_as_json(forest: PrefixForest) -> dict[str, Any]:
    arrays = {name: getattr(forest, name).tolist() for name in _ARRAYS}
    return {**arrays, "page_size": forest.page_size}


def forest_from_json(content: Mapping[str, Any]) -> PrefixForest:
    """Raises ValueError if a field is wrong, or the fields do not fit each other."""
    order, shared, seq_lens = (whole_numbers(content, name) for name in _ARRAYS)
    page_size = whole(content, "page_size", least=1, most=(1 << 31) - 1)
    try:
        return build_forest(order, shared, seq_lens, page_size)
    except ForestError:  # its message may hold the whole array
        raise FieldError(f"{', '.join(_ARRAYS)} describe no forest") from None
