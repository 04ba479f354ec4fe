"""``python -m benchmarks real-model``: a trained model's perplexity through tree attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deft_backend.cli.errors import fail, reported, say

MODEL = "SmolLM2-135M-Instruct (Q4_1)"
ON_GPU, ON_CPU = (1024, 50, 1000), (64, 3, 8)
"""Shared tokens, continuations, and tokens of a continuation."""


def real_model(
    folder: Annotated[
        Path | None, typer.Option(help="Where the checkpoint goes; default: the cache folder.")
    ] = None,
    policies: Annotated[
        str, typer.Option(metavar="POLICY[,POLICY…]", help="Policies to compare.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    out: Annotated[Path, typer.Option(help="File of rows.")] = Path("reports/real-model.json"),
) -> None:
    """Perplexity of the Python manual, decoded token by token behind a shared beginning.

    Compares tree attention with PyTorch's attention. The checkpoint also serves `deft serve` and
    `deft ab`. On the CPU, which interprets the kernels, the continuations are few and short.
    """
    import torch

    from benchmarks.real_model.checkpoint import CheckpointError, make_checkpoint, packaged
    from benchmarks.real_model.perplexity import HOST, Decoder, cut, python_manual
    from benchmarks.row_files import write_rows
    from deft_backend.files.folders import cache_directory
    from deft_backend.files.provenance import provenance
    from deft_backend.settings.policy_names import POLICY_NAMES
    from deft_backend.shapes import SHORT_DTYPES

    console = Console()
    if dtype not in SHORT_DTYPES:
        raise fail(f"--dtype is {dtype!r}; expected one of {', '.join(SHORT_DTYPES)}")
    for name in policies.split(","):
        if name not in POLICY_NAMES:
            raise fail(f"there is no policy {name!r}; expected some of {', '.join(POLICY_NAMES)}")
    kind = getattr(torch, SHORT_DTYPES[dtype])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with reported(CheckpointError, ValueError):
        where = folder or cache_directory() / "models" / f"smollm2-135m-{dtype}"
        where = make_checkpoint(packaged(), where, kind)
        say(console, f"checkpoint: {where}")
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(where / "tokenizer.json")).encode(python_manual()).ids
        shared, continuations, length = ON_GPU if device.type == "cuda" else ON_CPU
        text = cut(ids, shared, continuations, length)
    decoder = Decoder(where, kind, device, text)
    rows: list[dict[str, Any]] = []
    for name in (HOST, *policies.split(",")):
        attention = None if name == HOST else decoder.attention(name)
        found = decoder.perplexity(attention)
        rows.append(
            {
                "attention": name,
                "perplexity": round(found, 5),
                "tokens": text.tokens,
                "shared": shared,
                "continuations": continuations,
                "dtype": dtype,
            }
        )
        say(console, f"{name}: perplexity {found:.5f} over {text.tokens:,} tokens")
        write_rows(out, rows, {**provenance(), "model": MODEL})
    say(console, str(out))
