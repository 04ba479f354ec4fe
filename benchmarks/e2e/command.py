"""``python -m benchmarks e2e``: real servers of each backend, measured with the same requests."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.e2e.launch import (
    HOSTS,
    ChoiceError,
    Host,
    Launch,
    checked_backends,
    parse_drafts,
    same_prefill,
)
from benchmarks.e2e.rows import rows_table
from benchmarks.e2e.run import Recorder, Side, record
from benchmarks.e2e.served_model import (
    SHAPES,
    WEIGHTS,
    Model,
    ModelError,
    read_model,
    write_model,
    written_model,
)
from benchmarks.e2e.workloads import WORKLOADS, chosen_jobs, longest_request
from benchmarks.row_files import RowsError
from deft_backend.cli.errors import fail, host_arguments, reported, say, stderr, unwound
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.settings.policy_names import POLICY_NAMES
from deft_backend.tools.harness.workload import WorkloadError
from deft_backend.tools.servers.driver_stub import num_gpus
from deft_backend.tools.traces.arrivals import TraceError

ERRORS = (ChoiceError, ModelError, RowsError, TraceError, WorkloadError)
"""Errors that a user can fix; no server has started then."""

HostArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- HOST OPTIONS]", help="Every server gets them unchanged."),
]
ShapeOption = Annotated[
    str | None,
    typer.Option(help=f"Default: llama-3.1-8b, or tiny without a GPU. {', '.join(SHAPES)}."),
]
WeightsOption = Annotated[
    str, typer.Option(help="random, or dummy: then only times can be compared.")
]
LayersOption = Annotated[
    int | None,
    typer.Option(min=1, help="Write only so many layers of --shape, if not all fit the GPUs."),
]
TpOption = Annotated[int, typer.Option(min=1, help="GPUs over which each server splits the model.")]
CheckpointOption = Annotated[
    Path | None, typer.Option(help="Folder that keeps the written checkpoint for later runs.")
]
StartOption = Annotated[
    float, typer.Option(min=1.0, help="Time limit for a server's start, in seconds.")
]
TogetherOption = Annotated[
    bool,
    typer.Option(
        "--together",
        help="Start all servers at once; the host's options must give each its share of the GPU.",
    ),
]


def listed(text: str) -> list[str]:
    """The words between the commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def typed_command() -> str:
    """The command as the user typed it, for a record's header."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


@dataclass(frozen=True)
class ModelChoice:
    """The model of the servers: the user's checkpoint, or a shape to write."""

    path: str | None = None
    shape: str | None = None
    weights: str = "random"
    layers: int | None = None
    checkpoint: Path | None = None


@contextmanager
def served_model(host: Host, choice: ModelChoice) -> Iterator[Model]:
    """The model; a checkpoint written to a temporary folder lasts as long as the block.

    Raises ChoiceError or ModelError.
    """
    if choice.path is not None:
        if choice.layers is not None:
            raise ChoiceError("--layers is given, but --model has its own; leave one of them out")
        yield read_model(choice.path)
        return
    on_gpu = host.on_gpu()
    shape = choice.shape or ("llama-3.1-8b" if on_gpu else "tiny")
    for what, name, known in (("shape", shape, SHAPES), ("weights", choice.weights, WEIGHTS)):
        if name not in known:
            raise ChoiceError(f"--{what} is {name!r}; expected one of {', '.join(known)}")
    most = SHAPES[shape]["num_hidden_layers"]
    if choice.layers is not None and choice.layers > most:
        raise ChoiceError(f"--layers is {choice.layers}; expected 1 to {most}, as {shape} has")
    dtype = "bfloat16" if on_gpu else "float32"
    with tempfile.TemporaryDirectory(prefix="deft-model-") as temporary:
        if choice.checkpoint is None:
            yield write_model(Path(temporary), shape, choice.weights, dtype, layers=choice.layers)
            return
        part = "" if choice.layers is None else f"-{choice.layers}-layers"
        folder = choice.checkpoint / f"{shape}{part}-{choice.weights}"
        if not (folder / "complete").is_file():
            write_model(folder, shape, choice.weights, dtype, layers=choice.layers)
            (folder / "complete").touch()
        yield written_model(folder, shape, choice.weights, dtype, choice.layers)


def checked_ranks(launch: Launch) -> Launch:
    """The launch; raises ChoiceError for more ranks than GPUs, or than the heads can be split."""
    ranks = launch.tensor_parallel
    if launch.disaggregated:
        missing = [name for name in ("nixl", "sglang_router") if find_spec(name) is None]
        if missing or launch.host.name != "sglang":
            raise ChoiceError(
                "--disaggregated needs SGLang, and the packages nixl and sglang-router; missing: "
                f"{', '.join(missing) or 'SGLang'}"
            )
    for option in launch.options:
        if option.partition("=")[0] in ("--tp", "--tp-size", "-tp", "--tensor-parallel-size"):
            raise ChoiceError(
                f"{option} is among the host's options; use --tp of this command, which the rows "
                "record"
            )
    gpus = ranks * (2 if launch.disaggregated else 1)
    if launch.host.on_gpu() and gpus > max(1, num_gpus()):
        raise ChoiceError(f"a server needs {gpus} GPUs, but this machine has {num_gpus()} GPUs")
    if ranks > 1 and (heads := launch.model.config["num_attention_heads"]) % ranks:
        raise ChoiceError(f"--tp is {ranks}; expected a divisor of the {heads} query heads")
    return launch


def measure_servers(
    launches: Sequence[tuple[Launch, Sequence[str]]],
    jobs_of: Sequence[str],
    cases: Sequence[str],
    gen: int | None,
    repeats: int | None,
    traces: Path | None,
    out: Path,
    *,
    reference: str,
    together: bool,
) -> None:
    """Measure workloads on every backend of every launch, and show the rows.

    Raises typer.Exit with 1 if a row has an error; raises :data:`ERRORS`.
    """
    console = Console()
    say_line = partial(say, console)
    on_gpu = launches[0][0].host.on_gpu()
    if find_spec("aiohttp") is None:
        raise fail("aiohttp is not installed; run: pip install 'deft-backend[bench]'")
    if not on_gpu:
        stderr.print("[yellow]no usable GPU: answers are checked, but times mean nothing[/yellow]")
    jobs = chosen_jobs(jobs_of, cases, gen, repeats, traces, on_gpu=on_gpu)
    model = launches[0][0].model
    for job in jobs:
        longest = longest_request(job.workload(model.ids, 1))
        if longest >= model.context:
            raise ChoiceError(
                f"{job.name} has requests of {longest} tokens; {model.name} takes {model.context}"
            )
    sides = [Side(launch, backend) for launch, backends in launches for backend in backends]
    stopped = f"all servers have ended; the rows of finished workloads are in {out}"
    with unwound(console, stopped):
        recorder = Recorder(out, typed_command(), sides, reference)
        rows = record(sides, jobs, recorder, out.with_suffix(".logs"), say_line, together=together)
    (console if console.is_terminal else Console(width=170)).print(rows_table(rows))
    say(console, f"rows    {out}")
    if any(row["error"] for row in rows):
        raise typer.Exit(1)


def e2e(
    host_args: HostArguments = None,
    host: HostOption = None,
    backends: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="Default: the plugin and the host's backends. host: the host's default.",
        ),
    ] = None,
    workloads: Annotated[
        str, typer.Option(metavar="NAME[,NAME…]", help=f"{', '.join(WORKLOADS)}.")
    ] = "grid",
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[WORKLOAD:]PREFIX,BRANCHES,SUFFIX[:TOKENS]",
            help="A case in place of the workload's default ones; may be repeated. Branches: "
            "requests, beams, samples or sessions. Suffix: own tokens; of rollouts, prompts. "
            "Tokens: in place of --gen.",
        ),
    ] = None,
    gen: Annotated[
        int | None,
        typer.Option(min=1, help="Output tokens to time; of rollouts, the longest answer's."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Repeats of each workload. The median counts.")
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="DeFT's recorded trees of thoughts: a file or a folder.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Backend whose answers are the reference; SGLang with the plugin then "
            "also prefills with it."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder. Default: write a checkpoint of --shape.")
    ] = None,
    shape: ShapeOption = None,
    layers: LayersOption = None,
    weights: WeightsOption = "random",
    checkpoint: CheckpointOption = None,
    tp: TpOption = 1,
    drafts: Annotated[
        str | None,
        typer.Option(
            metavar="KIND,TOKENS,ACCEPTED",
            help="Servers draft: eagle, ngram or mtp, query tokens of a verification, and tokens "
            "that the host is forced to accept in each.",
        ),
    ] = None,
    disaggregated: Annotated[
        bool,
        typer.Option(
            help="SGLang: each server is a prefill and a decode server behind sglang-router, on "
            "GPUs of their own; NIXL transfers the KV."
        ),
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(help=f"The plugin's policy; the rows name it: {', '.join(POLICY_NAMES)}."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="JSON file of rows; an existing file is added to.")
    ] = Path("reports/e2e.json"),
    start_timeout: StartOption = 500.0,
    together: TogetherOption = False,
) -> None:
    """Send the same requests to a server of each backend, and compare.

    The rows are written after every workload, so an interrupted run keeps them. Later runs with
    other backends or workloads add to the same file. Exits with 1 if a row has an error.
    """
    chosen = HOSTS[chosen_host(host, needed=False)]
    names = listed(workloads)
    with reported(*ERRORS), ExitStack() as opened:
        servers = checked_backends(chosen, listed(backends or ",".join(chosen.defaults())))
        choice = ModelChoice(model, shape, weights, layers, checkpoint)
        launch = Launch(
            chosen,
            opened.enter_context(served_model(chosen, choice)),
            tuple(host_arguments(host_args)),
            tensor_parallel=tp,
            policy=policy_for(policy, chosen, servers),
            disaggregated=disaggregated,
            start_seconds=start_timeout,
        )
        if drafts is not None:  # the host's own choice of a prefill depends on the drafts
            launch = replace(launch, drafts=parse_drafts(drafts))
        elif "draft-trees" in names:
            raise ChoiceError("draft-trees needs servers that draft: --drafts eagle,60,3")
        if reference is not None or drafts is not None:
            prefill = same_prefill(chosen, reference or chosen.reference())
            launch = replace(launch, environment=prefill)
        measure_servers(
            [(checked_ranks(launch), servers)],
            names,
            case or (),
            gen,
            repeats,
            traces,
            out,
            reference=reference or chosen.reference(),
            together=together,
        )


def policy_for(policy: str | None, host: Host, backends: Sequence[str]) -> str | None:
    """The policy, which only the plugin's server has; raises ChoiceError if it is unknown."""
    if policy is not None and policy not in POLICY_NAMES:
        raise ChoiceError(f"--policy is {policy!r}; expected one of {', '.join(POLICY_NAMES)}")
    if policy is not None and host.ours not in backends:
        raise ChoiceError(
            f"--policy is {policy}, which is for the backend {host.ours}; name it with "
            "--backends, or leave --policy out"
        )
    return policy
