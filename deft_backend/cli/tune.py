"""`deft tune`: measure the cost of attention on this GPU, for the policies."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Option

from deft_backend.cli.errors import fail, reported, say
from deft_backend.cli.shapes import (
    HeadDimOption,
    ShapeModelOption,
    chosen_shape,
    eight_bit_cache,
    table_of,
)
from deft_backend.files.folders import create_private, tables_directory
from deft_backend.settings.config import SettingsError
from deft_backend.shapes import TILE_NAMES

if TYPE_CHECKING:
    from deft_backend.costs import CostModel
    from deft_backend.costs.table_lookup import TableInUse
    from deft_backend.costs.tables import TableKey


def tune(
    model: ShapeModelOption = None,
    heads: Annotated[str | None, Option(help="Query/KV heads on one GPU; default: 32/8.")] = None,
    head_dim: HeadDimOption = None,
    dtype: Annotated[str | None, Option(help="fp16 or bf16; default: fp16.")] = None,
    kv_cache_dtype: Annotated[
        str, Option(help="KV cache: auto (as the queries), fp8, fp8_e4m3 or fp8_e5m2.")
    ] = "auto",
    page_size: Annotated[int, Option(min=1, help="Tokens a page; SGLang's adapter takes 1.")] = 1,
    show: Annotated[bool, Option("--show", help="Print the table in use instead.")] = False,
) -> None:
    """Measure attention of one head shape on this machine's GPU, in under two minutes.

    Policies plan with the table from then on. A server reads it when it starts.
    """
    shape = chosen_shape(model, heads, head_dim, dtype, default_dtype="fp16")
    shape = shape._replace(dtype=eight_bit_cache(kv_cache_dtype) or shape.dtype)
    with reported(SettingsError):
        key, used = table_of(shape, page_size)
        path = tables_directory() / key.file_name
    if show:
        _show(key, used)
    else:
        _measure(key, used.model, path)


def _measure(key: TableKey, before: CostModel, path: Path) -> None:
    import torch

    if not key.gpu:
        raise fail(
            "deft tune measures on an NVIDIA GPU, and this machine has none; run it on the "
            "server's machine. --show prints the table in use"
        )
    from deft_backend.attention import AttentionError
    from deft_backend.costs.table_lookup import save_table
    from deft_backend.tools.tuning.measure import tune as run

    # Drop the warning that this GPU has no table yet: this run writes it.
    logging.getLogger("deft_backend.costs.table_lookup").setLevel(logging.ERROR)
    console = Console()
    say(console, f"{key.gpu}: {key.shape}")
    began = time.perf_counter()
    try:
        with console.status("starting") as status, reported(AttentionError):
            tuned = run(key, before, lambda title: status.update(title))
    except torch.OutOfMemoryError as error:
        raise fail(
            f"too little free GPU memory to measure with ({error}); stop other programs that use it"
        ) from None
    try:
        create_private(path.parent)
        save_table(tuned.model, key, path)
    except OSError as error:
        raise fail(f"cannot write {path}: {error.strerror}; set DEFT_CACHE_DIR") from None
    _print(tuned.model, console)
    found = (
        f"attention takes {1 - tuned.ratio:.1%} less time than with the costs in use, in the "
        "geometric mean"
    )
    if tuned.ratio == 1.0:
        found = "no costs make faster plans than those in use, which the table keeps"
    say(console, f"{tuned.batches} batches, {tuned.plans} different plans: {found}")
    say(console, f"{path}, in {time.perf_counter() - began:.0f} s")


def _show(key: TableKey, used: TableInUse) -> None:
    console = Console()
    say(console, f"{key.gpu or 'CPU'}: {key.shape}")
    if used.notice is not None:
        say(console, used.notice)
    say(console, f"{'tuned' if used.tuned else 'shipped'} table {used.path}")
    say(console, used.model.source)
    _print(used.model, console)


def _print(model: CostModel, console: Console) -> None:
    tiles = model.tiles
    for shape, (item, token) in enumerate(zip(tiles.item_ns, tiles.token_ns, strict=True)):
        say(console, f"{TILE_NAMES[shape]}: {item:.4g} ns an item, {token:.4g} ns a token")
    say(
        console,
        f"partial result: {tiles.partial_ns:.4g} ns; reduction: {tiles.reduce_ns:.4g} ns; "
        f"memory: {model.bandwidth_gb_s:.0f} GB/s; launch: {model.launch_ms * 1e3:.3g} us",
    )
