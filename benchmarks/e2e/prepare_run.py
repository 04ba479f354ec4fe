"""Turn the user's choice into a run: check the model, the servers and the workloads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.e2e.backend_runs import Setup
from benchmarks.e2e.backends import HOSTS, Host, Launch, ServerChoiceError, checked_backends
from benchmarks.e2e.choice import (
    WORKLOADS,
    Choice,
    ChoiceError,
    ModelChoice,
    ServerChoice,
    one_of,
)
from benchmarks.e2e.chosen_workloads import chosen_workloads
from benchmarks.e2e.drafts import parse_drafts
from benchmarks.e2e.plain_check import PLAIN, arithmetic_of
from benchmarks.e2e.prompt_cases import CaseError
from benchmarks.e2e.served_model import (
    SHAPES,
    WEIGHTS,
    Model,
    ModelError,
    read_config,
    read_model,
    write_model,
    written_model,
)
from deft_backend.settings.policy_names import POLICY_NAMES
from deft_backend.tools.servers.driver_stub import num_gpus
from deft_backend.tools.traces.recorded_trees import TraceError

ERRORS = (ChoiceError, CaseError, ModelError, ServerChoiceError, TraceError)
"""The errors of :func:`prepared` that a user can fix."""


@contextmanager
def prepared(choice: Choice) -> Iterator[Setup]:
    """The run that :func:`benchmarks.e2e.backend_runs.record` takes.

    A checkpoint that is written to a temporary folder lasts as long as the block.

    Raises
    ------
    ChoiceError, CaseError, ModelError, ServerChoiceError, TraceError
        If the choice cannot be measured; no server has started then.
    """
    host = HOSTS[one_of("the host", choice.servers.host, HOSTS)]
    backends = checked_backends(host, choice.servers.backends or host.defaults())
    names = [one_of("the workload", name, WORKLOADS) for name in choice.workloads]
    if not names or not backends:
        raise ChoiceError("there is nothing to measure; name a workload and a backend")
    on_gpu = host.on_gpu()
    shape = choice.model.shape or _default_shape(names, on_gpu)
    _check_model(choice.model, shape, names)
    _check_ranks(choice.servers, choice.model, shape, num_gpus() if on_gpu else None)
    with tempfile.TemporaryDirectory(prefix="deft-e2e-model-") as temporary:
        served_dtype = "bfloat16" if on_gpu else "float32"
        model = _model(choice.model, shape, Path(temporary), served_dtype)
        options = tuple(choice.servers.options)
        prefills_like = choice.servers.reference
        if choice.servers.drafts is not None:  # the host's own choice depends on the drafts
            prefills_like = prefills_like or host.reference()
        launch = Launch(
            host, model, tokenizer="clients" in names, options=options,
            environment=_same_prefill(host, prefills_like),
            tensor_parallel=choice.servers.tensor_parallel,
            policy=_policy(choice.servers, backends),
        )  # fmt: skip
        launch = replace(launch, sleeps="rollouts" in names and on_gpu)
        if choice.servers.drafts is not None:
            launch = _drafting(launch, choice.servers.drafts, Path(temporary) / "draft")
        if PLAIN in (choice.servers.reference, *backends):
            launch = _checked_plainly(names, choice.model.path, launch)
        workloads = [w for name in names for w in chosen_workloads(name, choice, model, on_gpu)]
        yield Setup(
            launch, backends, choice.servers.reference or host.reference(), workloads,
            choice.output.rows, choice.output.log_folder, choice.output.command,
            choice.servers.start_seconds,
        )  # fmt: skip


def _policy(servers: ServerChoice, backends: Sequence[str]) -> str | None:
    """The policy by name; only the plugin's server has one."""
    if servers.policy is not None:
        one_of("the policy", servers.policy, POLICY_NAMES)
        ours = HOSTS[servers.host].ours
        if ours not in backends:
            raise ChoiceError(
                f"--policy is {servers.policy}, which is for the backend {ours}; name it with "
                "--backends, or leave --policy out"
            )
    return servers.policy


def _same_prefill(host: Host, reference: str | None) -> dict[str, str]:
    """Environment in which the server with the plugin prefills as the named reference does.

    Backends differ in their arithmetic over a cache of 8 bits. fa3 also rounds queries and softmax
    weights to 8 bits, and triton reads a prompt's keys and values before they are rounded. If the
    prompts are computed in two ways, answers differ by more than the tolerance
    (docs/reliability.md).
    """
    if reference in (None, PLAIN) or host.name != "sglang":
        return {}
    if "DEFT_FALLBACK_BACKEND" in os.environ:
        return {}
    return {"DEFT_FALLBACK_BACKEND": reference}


def _drafting(launch: Launch, text: str, folder: Path) -> Launch:
    """The launch of servers that draft, with a draft model in `folder` if they need one."""
    drafts = parse_drafts(text)
    host, target = launch.host.name, read_config(launch.model)
    return replace(
        launch, drafts=tuple(drafts.options(host, target, folder)), drafts_label=drafts.label,
        environment={**launch.environment, **drafts.environment(host)},
    )  # fmt: skip


def _checked_plainly(names: Sequence[str], path: str | None, launch: Launch) -> Launch:
    """The launch of a server whose answers a model in plain PyTorch can check."""
    if path is not None:
        raise ChoiceError(
            f"--model is {path}, but the reference {PLAIN} knows only the models that this command "
            f"writes; leave --model out, or name a backend of {launch.host.name}"
        )
    if list(names) != ["traffic"]:
        raise ChoiceError(
            f"the reference {PLAIN} checks the workload traffic alone, and not "
            f"{', '.join(names)}; name a backend of {launch.host.name}"
        )
    if not arithmetic_of(launch).coarse_prompts:
        return launch
    return replace(launch, environment={**launch.environment, "DEFT_FALLBACK_BACKEND": "fa3"})


def _default_shape(names: Sequence[str], on_gpu: bool) -> str:
    if "scheduler" in names:
        return "one-layer"
    return "llama-3.1-8b" if on_gpu else "tiny"


def _check_model(model: ModelChoice, shape: str, names: Sequence[str]) -> None:
    """Refuse a model that cannot be served, or that a workload cannot be measured with."""
    one_of("the shape", shape, SHAPES)
    one_of("the weights", model.weights, WEIGHTS)
    if model.layers is not None:
        most = SHAPES[shape]["num_hidden_layers"]
        if model.path is not None:
            raise ChoiceError("--layers is given, but --model has its own; leave one of them out")
        if not 1 <= model.layers <= most:
            raise ChoiceError(f"--layers is {model.layers}; expected 1 to {most}, as {shape} has")
    if "scheduler" in names and (model.path or shape != "one-layer" or len(names) > 1):
        raise ChoiceError(
            "the workload scheduler measures another model, --shape one-layer; run it by itself"
        )
    if "traffic" in names and model.weights == "dummy" and not model.path:
        raise ChoiceError(
            "the workload traffic checks tokens, which dummy weights make without attention; "
            "expected --weights random"
        )


def _check_ranks(servers: ServerChoice, model: ModelChoice, shape: str, gpus: int | None) -> None:
    """Refuse more ranks than there are GPUs or than the heads can be split over."""
    ranks = servers.tensor_parallel
    if ranks < 1:
        raise ChoiceError(f"--tp is {ranks}; expected 1 or more")
    for option in servers.options:
        if option.partition("=")[0] in ("--tp", "--tp-size", "-tp", "--tensor-parallel-size"):
            raise ChoiceError(
                f"{option} is among the host's options; use --tp of this command, which the rows "
                "record"
            )
    if gpus is not None and ranks > max(1, gpus):
        raise ChoiceError(f"--tp is {ranks}, but this machine has {gpus} GPUs")
    heads = SHAPES[shape]["num_attention_heads"]
    if model.path is None and heads % ranks:
        raise ChoiceError(f"--tp is {ranks}; expected a divisor of the {heads} query heads")


def _model(choice: ModelChoice, shape: str, temporary: Path, served_dtype: str) -> Model:
    if choice.path is not None:
        return read_model(choice.path)
    if choice.checkpoint is None:
        return write_model(temporary, shape, choice.weights, served_dtype, layers=choice.layers)
    part = "" if choice.layers is None else f"-{choice.layers}-layers"
    folder = choice.checkpoint / f"{shape}{part}-{choice.weights}"
    complete = folder / "complete"
    if not complete.is_file():
        write_model(folder, shape, choice.weights, served_dtype, layers=choice.layers)
        complete.touch()
    return written_model(folder, shape, choice.weights, served_dtype, choice.layers)
