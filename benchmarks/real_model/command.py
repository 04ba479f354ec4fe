"""``python -m benchmarks real-model``: a trained model's perplexity through tree attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.e2e.command import HostArguments, listed
from deft_backend.cli.errors import fail, host_arguments, reported, say

MODEL = "SmolLM2-135M-Instruct (Q4_1)"
SECTION_CHARACTERS = 4000
ON_GPU, ON_CPU = (1024, 50, 1000), (64, 3, 8)
"""Shared tokens, continuations, and tokens of a continuation."""


def real_model(
    host_args: HostArguments = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the checkpoint goes; default: the cache folder.")
    ] = None,
    policies: Annotated[
        str, typer.Option(metavar="POLICY[,POLICY…]", help="Policies to compare.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Compare answers about the manual in two servers of sglang or vllm instead, as "
            "`deft ab` does.",
        ),
    ] = None,
    drafts: Annotated[
        str,
        typer.Option(
            metavar="TOKENS[,TOKENS…]",
            help="With --host: n-gram drafts of a verification, in servers of their own; 0: none.",
        ),
    ] = "0,4",
    control: Annotated[
        bool, typer.Option("--control", help="With --host: compare the host's backend with itself.")
    ] = False,
    sections: Annotated[int, typer.Option(min=1, help="With --host: sections to ask about.")] = 8,
    gen: Annotated[int, typer.Option(min=1, help="With --host: tokens of an answer.")] = 128,
    out: Annotated[Path, typer.Option(help="File of rows.")] = Path("reports/real-model.json"),
) -> None:
    """Perplexity of the Python manual, decoded token by token behind a shared beginning.

    Compares tree attention with PyTorch's attention; with --host, the answers of two servers. The
    checkpoint also serves `deft serve` and `deft ab`. On the CPU, which interprets the kernels,
    the continuations are few and short.
    """
    import torch

    from benchmarks.real_model.checkpoint import CheckpointError, make_checkpoint, packaged
    from benchmarks.real_model.perplexity import HOST, Decoder, cut, python_manual
    from benchmarks.row_files import write_rows
    from deft_backend.files.folders import cache_directory
    from deft_backend.files.provenance import provenance
    from deft_backend.settings.policy_names import POLICY_NAMES
    from deft_backend.shapes import SHORT_DTYPES

    options = host_arguments(host_args)
    if options and host is None:
        raise fail("options of the host are for its servers; name it with --host")
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
        if host is not None:
            _answers(where, host, options, listed(drafts), control, (sections, gen), out, console)
            return
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(where / "tokenizer.json")).encode(python_manual()).ids
        shared, continuations, length = ON_GPU if device.type == "cuda" else ON_CPU
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
        write_rows(out, rows, {**provenance(), "model": MODEL})
    say(console, str(out))


def _answers(
    model: Path, host: str, options: Sequence[str], drafts: list[str], control: bool,
    sizes: tuple[int, int], out: Path, console: Console,
) -> None:  # fmt: skip
    """One row for each number of drafts."""
    from benchmarks.real_model.perplexity import python_manual
    from benchmarks.real_model.served import answers, sections
    from benchmarks.row_files import make_folder, write_rows
    from deft_backend.files.provenance import provenance
    from deft_backend.tools.ab.sides import AbError, Progress
    from deft_backend.tools.harness.client import ServerError
    from deft_backend.tools.servers.command import HOST_NAMES, StartError

    if host not in HOST_NAMES:
        raise fail(f"--host is {host!r}; expected one of {', '.join(HOST_NAMES)}")
    count, max_tokens = sizes
    workload = sections(python_manual(), count, SECTION_CHARACTERS, max_tokens)
    rows: list[dict[str, Any]] = []
    make_folder(out)
    for number in drafts:
        with reported(StartError, ServerError, AbError, ValueError), Progress(console) as to:
            logs = out.with_suffix("") / f"{host}-{number}"
            logs.mkdir(parents=True, exist_ok=True)
            row = answers(
                model, host, workload, logs, to, drafts=int(number), control=control,
                options=options,
            )  # fmt: skip
            rows.append(row)
        say(console, f"{rows[-1]}")
        write_rows(out, rows, {**provenance(), "model": MODEL, "workload": workload.description})
