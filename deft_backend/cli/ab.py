"""`deft ab`: send the same requests to two servers, and compare tokens, KV reads and times."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from deft_backend.cli.errors import fail, host_arguments
from deft_backend.cli.models import ModelOption
from deft_backend.cli.serve import HostOption
from deft_backend.tools.ab.workloads import CHOICES
from deft_backend.tools.traces.invented import MOST_TOKENS


def ab(
    host_args: Annotated[
        list[str] | None,
        Argument(metavar="-- HOST OPTIONS", help="Both servers get them unchanged."),
    ] = None,
    model: ModelOption = None,
    host: HostOption = None,
    workload: Annotated[
        list[str] | None,
        Option(
            help=f"One of {', '.join(CHOICES)}; may be repeated. Default: the first five, or "
            "the trace of arrivals."
        ),
    ] = None,
    urls: Annotated[
        tuple[str, str] | None,
        Option(metavar="A B", help="Compare two servers that run; --model picks a model."),
    ] = None,
    rate: Annotated[
        float | None,
        Option(help="Average requests a second, at random times; default: all at once."),
    ] = None,
    goodput: Annotated[
        bool,
        Option(
            "--goodput",
            help="Also find the highest rate, from --rate or 1 on, at which the 99th percentile "
            "between tokens stays below --bound-ms.",
        ),
    ] = False,
    bound_ms: Annotated[
        float | None, Option(min=0.001, help="Milliseconds between tokens for --goodput; 50.")
    ] = None,
    branches: Annotated[
        int | None,
        Option(min=1, max=100_000, help="Requests that run at the same time in each workload."),
    ] = None,
    prefix_tokens: Annotated[
        int | None,
        Option(min=1, max=MOST_TOKENS, help="About how many tokens a workload's requests share."),
    ] = None,
    max_tokens: Annotated[int | None, Option(min=1, help="Tokens of each answer.")] = None,
    trace: Annotated[
        Path | None, Option(help="Arrivals in Mooncake's format, in place of the workloads.")
    ] = None,
    baseline: Annotated[
        str | None, Option(help="The host's backend to compare with; default: its choice.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Folder for the report; default: reports/ab-<time>.")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Smaller workloads.")] = False,
    exact: Annotated[
        bool | None,
        Option(
            help="Compare log-probabilities, and exit with 1 for any difference; default: only "
            "for own servers without --rate, --goodput and arrivals."
        ),
    ] = None,
) -> None:
    """Compare two servers on the same requests: tokens, KV reads and times.

    The command starts a model's server without and then with the plugin, or takes two servers that
    run (--urls) and sends them the key in OPENAI_API_KEY. It writes report.html and results.json.

    A token is wrong if a server was sure of another one: its two likeliest tokens were 0.15 or more
    apart in log-probability (0.45 with a KV cache of 8 bits). Otherwise rounding decides. The exit
    code is 1 if a server lost a request or gave a wrong token; with --exact, if any token differs.

    A trace of arrivals has a JSON object a line: timestamp in ms, input_length, output_length, and
    hash_ids, one for each 512 tokens of the prompt; equal ids at the start mean an equal prefix.
    """
    from deft_backend.cli.ab_run import AbOptions, run_asked

    extra = host_arguments(host_args)
    if find_spec("aiohttp") is None:
        raise fail("aiohttp is not installed; run: pip install 'deft-backend[bench]'")
    sizes = (branches, prefix_tokens, max_tokens)
    asked = (urls, model, host, workload or (), rate, sizes, quick)
    run_asked(AbOptions(*asked, trace, baseline, extra, out, exact, goodput, bound_ms))
