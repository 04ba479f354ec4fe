"""``python -m benchmarks mla``: multi-head latent attention over trees."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.kernel.methods.flashinfer_package import flashinfer_unavailable
from benchmarks.latent.flashinfer_latent import flashinfer_decode, flashinfer_latent_origin
from benchmarks.latent.latent_case import hosts_kernel
from benchmarks.latent.measure_latent import Peer, WrongResult, cases, measure
from benchmarks.row_files import RowsError, make_folder, write_rows
from deft_backend.cli.errors import fail
from deft_backend.files.provenance import provenance
from deft_backend.tools.tuning.launch_clock import Budget

FLASHINFER, NONE = "flashinfer", "none"


def mla(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    page_size: Annotated[list[int], typer.Option(help="Tokens of a page.")] = [64],  # noqa: B006
    rep_ms: Annotated[int, typer.Option(min=5, help="Milliseconds of repetitions.")] = 30,
    peers: Annotated[
        str | None,
        typer.Option(help="flashinfer or none. By default flashinfer, if it is installed."),
    ] = None,
) -> None:
    """Time the host's MLA kernel request by request, and over a plan: one row for each case.

    FlashInfer's MLA kernel is timed request by request.
    """
    if not torch.cuda.is_available():
        raise fail("mla times FlashAttention-3, which needs a Hopper GPU")
    device = torch.device("cuda")
    others, origins = chosen_peers(peers, device)
    rows = []
    try:
        make_folder(out)
        for size in page_size:
            for row in measure(cases(size), device, Budget(launch_ms=rep_ms), others):
                typer.echo(json.dumps(row))
                rows.append(row)
    except (RowsError, WrongResult) as error:
        raise fail(str(error)) from None
    finally:
        write_rows(out, rows, {**provenance(), "kernel": hosts_kernel()[0], "peers": origins})


def chosen_peers(
    asked: str | None, device: torch.device
) -> tuple[Mapping[str, Peer], Mapping[str, str]]:
    """The peers, and the package and build of each. Without FlashInfer, one line says so.

    It is an error to ask for FlashInfer where it cannot run.
    """
    if asked not in (None, FLASHINFER, NONE):
        raise fail(f"--peers is {asked!r}; expected {FLASHINFER} or {NONE}")
    if asked == NONE:
        return {}, {}
    reason = flashinfer_unavailable(device)
    if reason is None:
        return {FLASHINFER: flashinfer_decode}, {FLASHINFER: flashinfer_latent_origin()}
    if asked is not None:
        raise fail(f"--peers {asked}: {reason}")
    typer.echo(f"without {FLASHINFER}: {reason}", err=True)
    return {}, {}
