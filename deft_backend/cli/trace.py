"""`deft trace`: make a trace of arrivals in Mooncake's format."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from deft_backend.cli.errors import fail, reported, say, stderr
from deft_backend.files.user_files import replace_file


def trace(
    out: Annotated[Path | None, Option(help="File to write; default: the standard output.")] = None,
    requests: Annotated[int, Option(help="Number of requests.")] = 200,
    rate: Annotated[float, Option(help="Requests a second, on average.")] = 2.0,
    system_tokens: Annotated[int, Option(help="Tokens that all prompts share.")] = 1024,
    documents: Annotated[int, Option(help="Documents that prompts are about.")] = 8,
    document_tokens: Annotated[int, Option(help="Mean tokens of a document.")] = 4096,
    own_tokens: Annotated[int, Option(help="Mean tokens of a turn's own text.")] = 256,
    answer_tokens: Annotated[int, Option(help="Mean tokens of an answer.")] = 200,
    turns: Annotated[float, Option(help="Mean turns of a conversation.")] = 1.5,
    forks: Annotated[int, Option(help="Sub-agents that fork from a turn and return to it.")] = 0,
    seed: Annotated[int, Option(help="The same seed gives the same trace.")] = 0,
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
    text = "".join(f"{line}\n" for line in dump_arrivals(arrivals))
    try:
        if out is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            replace_file(out, text)
    except BrokenPipeError:  # whoever read it has enough
        raise
    except OSError as error:
        where = out or "the standard output"
        reason = error.strerror or error
        raise fail(f"cannot write {where}: {reason}; name another file with --out") from None
    prompts = sum(arrival.input_length for arrival in arrivals)
    say(
        stderr,
        f"{len(arrivals):,} requests, which arrive within {arrivals[-1].timestamp / 1e3:,.0f} s; "
        f"{prompts:,} prompt tokens, {shared_tokens(arrivals) / prompts:.0%} of them shared with "
        f"an earlier request; {sum(a.output_length for a in arrivals):,} answer tokens",
    )
