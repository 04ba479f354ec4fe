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


def mla(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    page_size: Annotated[list[int], typer.Option(help="Tokens of a page.")] = [64],  # noqa: B006
    rep_ms: Annotated[int, typer.Option(min=5, help="Milliseconds of repetitions.")] = 30,
) -> None:
    """Time the host's MLA kernel request by request, and over a plan: one row for each case.

    FlashInfer's MLA kernel is timed request by request, if it is installed.
    """
    if not torch.cuda.is_available():
        raise fail("mla times FlashAttention-3, which needs a Hopper GPU")
    device = torch.device("cuda")
    others: Mapping[str, Peer] = {}
    origins = {}
    if reason := flashinfer_unavailable(device):
        typer.echo(f"without FlashInfer: {reason}", err=True)
    else:
        others, origins = (
            {"flashinfer": flashinfer_decode},
            {"flashinfer": flashinfer_latent_origin()},
        )
    rows = []
    try:
        make_folder(out)
        for size in page_size:
            for row in measure(cases(size), device, rep_ms, others):
                typer.echo(json.dumps(row))
                rows.append(row)
    except (RowsError, WrongResult) as error:
        raise fail(str(error)) from None
    finally:
        write_rows(out, rows, {**provenance(), "kernel": hosts_kernel()[0], "peers": origins})
