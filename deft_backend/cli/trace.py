"""`deft trace`: make a trace of arrivals in Mooncake's format."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from deft_backend.cli.errors import fail, reported, say, stderr


def trace(
    out: Annotated[
        Path | None, typer.Option(help="The file to write; default: the standard output.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 200,
    rate: Annotated[float, typer.Option(help="Requests a second, on average.")] = 2.0,
    system_tokens: Annotated[int, typer.Option(help="Tokens that all prompts share.")] = 1024,
    documents: Annotated[int, typer.Option(help="Documents that prompts are about.")] = 8,
    document_tokens: Annotated[int, typer.Option(help="Mean tokens of a document.")] = 4096,
    own_tokens: Annotated[int, typer.Option(help="Mean tokens of a turn's own text.")] = 256,
    answer_tokens: Annotated[int, typer.Option(help="Mean tokens of an answer.")] = 200,
    turns: Annotated[float, typer.Option(help="Mean turns of a conversation.")] = 1.5,
    forks: Annotated[
        int, typer.Option(help="Sub-agents that fork from a turn's history and return to it.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same trace.")] = 0,
) -> None:
    """Make a trace in Mooncake's format, for 'deft ab --trace'."""
    from deft_backend.tools.traces.arrivals import dump_arrivals, shared_tokens
    from deft_backend.tools.traces.made_arrivals import TraceShape, make_arrivals
    from deft_backend.tools.traces.recorded_trees import TraceError

    with reported(TraceError):
        shape = TraceShape(
            requests, rate, system_tokens, documents, document_tokens, own_tokens, answer_tokens,
            turns, seed, forks,
        )  # fmt: skip
    arrivals = make_arrivals(shape)
    lines = (line + "\n" for line in dump_arrivals(arrivals))
    try:
        if out is None:
            sys.stdout.writelines(lines)
            sys.stdout.flush()
        else:
            _write(out, lines)
    except BrokenPipeError:  # whoever read it has enough
        raise
    except OSError as error:
        where = out or "the standard output"
        raise fail(f"cannot write {where}: {error.strerror or error}") from None
    prompts = sum(arrival.input_length for arrival in arrivals)
    say(
        stderr,
        f"{len(arrivals):,} requests, which arrive within {arrivals[-1].timestamp / 1e3:,.0f} s; "
        f"{prompts:,} prompt tokens, {shared_tokens(arrivals) / prompts:.0%} of them shared with "
        f"an earlier request; {sum(a.output_length for a in arrivals):,} answer tokens",
    )


def _write(out: Path, lines: Iterable[str]) -> None:
    """Write a file in one go: an interrupted command leaves the old one as it was."""
    in_place = out.exists() and not out.is_file()  # a device or a pipe cannot be replaced
    out = Path(os.path.realpath(out))  # a link stays a link
    part = out if in_place else out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        if not in_place:
            part.replace(out)
    finally:
        if not in_place:
            part.unlink(missing_ok=True)
