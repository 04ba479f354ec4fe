"""`deft explain`: draw a tree in the terminal, with its groups and the bytes that they move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deft_backend.cli.errors import fail, reported
from deft_backend.config import Settings, SettingsError
from deft_backend.folders import state_directory
from deft_backend.forest import ForestError, PrefixForest
from deft_backend.policies import POLICY_NAMES, PolicyError, Target, get_policy

if TYPE_CHECKING:
    from deft_backend.telemetry.state_reader import StateReading

H100_SMS = 132
_BLOCKS_AN_SM = 2

_SIZES = {"fp16": 2, "bf16": 2, "fp32": 4}


def explain(
    port: Annotated[
        int | None, typer.Argument(metavar="[PORT]", help="With --server: the server's port.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A trace in DeFT's format: trees of thoughts or of tokens.")
    ] = None,
    index: Annotated[int, typer.Option(min=0, help="Which tree of the trace.")] = 0,
    iteration: Annotated[
        int | None,
        typer.Option(min=0, help="Decoding iteration of the trace; default: half-way."),
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(help="'nodes per level, then tokens per node', e.g. '1,4,16 1024,256,32'."),
    ] = None,
    server: Annotated[
        bool, typer.Option("--server", help="The last batch of a running server.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(POLICY_NAMES)}; default: auto, or the server's."),
    ] = None,
    heads: Annotated[str, typer.Option(help="Query heads/KV heads.")] = "32/8",
    head_dim: Annotated[int, typer.Option(min=1, help="Head dimension.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers that the bytes are summed over.")] = 1,
    dtype: Annotated[str, typer.Option(help="fp16, bf16 or fp32.")] = "fp16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw what requests share and the policy's groups; count the bytes that a step reads."""
    from deft_backend.explain import explain as explain_grouping
    from deft_backend.explain import render
    from deft_backend.telemetry.state_reader import StateError
    from deft_backend.traces.trace_files import TraceError

    if sum((trace is not None, tree is not None, server)) != 1:
        raise fail(
            "expected exactly one of --trace FILE, --tree 'NODES TOKENS' and --server [PORT]"
        )
    if port is not None and not server:
        raise fail(f"unexpected argument {port}; a port goes with --server")
    with reported(TraceError, ForestError, PolicyError, StateError, SettingsError):
        if server:
            forest, target, layers, title, used = _from_server(port)
        else:
            target = _target(heads, head_dim, dtype)
            used = "auto"
            forest, title = _described(tree, trace, index, iteration)
        name = policy or used
        grouping = get_policy(name).group(forest, target)
        explanation = explain_grouping(forest, grouping, target, layers)
    if as_json:
        content = {"source": title, "policy": name, **explanation.to_dict()}
        typer.echo(json.dumps(content, indent=2))
        return
    console = Console()
    console.print(f"[bold]{title}[/bold] · policy [cyan]{name}[/cyan]", highlight=False)
    render(explanation, console)


def _described(
    tree: str | None, trace: Path | None, index: int, iteration: int | None
) -> tuple[PrefixForest, str]:
    from deft_backend.traces.trace_files import TokenTree, TraceError, load_trace
    from deft_backend.traces.tree_forests import forest_at, forest_from_levels, token_tree_forest

    if tree is not None:
        return forest_from_levels(tree), f"tree {tree}"
    assert trace is not None
    trees = load_trace(trace)
    if isinstance(trees, TokenTree):
        step = len(trees.accepted[index]) // 2 if index < len(trees.accepted) else 0
        step = step if iteration is None else iteration
        return token_tree_forest(trees, index, step), f"{trace.name}, record {index}, step {step}"
    if index >= len(trees):
        raise TraceError(f"{trace} holds {len(trees)} trees; expected --index below that")
    chosen = trees[index]
    at = (chosen.last_iteration + 1) // 2 if iteration is None else iteration
    title = f"{trace.name}, tree {index}, iteration {at} of {chosen.last_iteration}"
    try:
        return forest_at(chosen, at), title
    except TraceError as error:
        raise TraceError(f"{trace}: tree {index}: {error}") from None


def _from_server(port: int | None) -> tuple[PrefixForest, Target, int, str, str]:
    from deft_backend.telemetry.state_reader import (
        StateError,
        read_state,
        running_servers,
        shown_forest,
        state_file,
    )

    folder = state_directory(Settings.from_env())
    if port is None:
        found = running_servers(folder)
        if len(found) != 1:
            names = ", ".join(map(str, found)) or "none"
            raise StateError(
                f"{len(found)} servers with the plugin are running according to {folder} (ports: "
                f"{names}); start one with 'deft serve', or name its port: --server PORT"
            )
        (path,) = found.values()
    else:
        path = state_file(folder, port)
    state = read_state(path)
    forest = state.forest
    if forest is None and not state.counters.steps_tree:
        raise StateError(f"{path}: the server has decoded no batch with tree attention yet")
    if forest is None:  # only the device knows the plan
        forest = shown_forest(path)
    target = _server_target(state, forest.page_size)
    title = f"server on port {path.name.split('-')[0]}, its last planned batch"
    used = state.policy if state.policy in POLICY_NAMES else "auto"
    return forest, target, state.num_layers, title, used


def _server_target(state: StateReading, page_size: int) -> Target:
    """The target that the server itself plans for, if this machine has its device."""
    import torch

    from deft_backend.attention.device_target import target_of
    from deft_backend.kernels import kernel_configuration

    heads, kv_heads, head_dim = state.num_query_heads, state.num_kv_heads, state.head_dim
    on_cpu = state.device.startswith("cpu")
    if not on_cpu and not torch.cuda.is_available():
        return _programs(heads, kv_heads, head_dim, state.dtype_bytes)
    dtype = getattr(torch, state.dtype.removeprefix("torch."))
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    return target_of(
        kernel_configuration(head_dim, dtype, device, heads // kv_heads), num_query_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device, page_size=page_size,
    )  # fmt: skip


def _target(heads: str, head_dim: int, dtype: str) -> Target:
    try:
        query_heads, kv_heads = (int(part) for part in heads.split("/"))
        if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
            raise ValueError
    except ValueError:
        raise fail(
            f"--heads is {heads!r}; expected QUERY/KV such as 32/8, the first a multiple of the "
            "second"
        ) from None
    if dtype not in _SIZES:
        raise fail(f"--dtype is {dtype!r}; expected one of {', '.join(_SIZES)}")
    return _programs(query_heads, kv_heads, head_dim, _SIZES[dtype])


def _programs(query_heads: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> Target:
    """The target of one H100, so that an explanation is the same on every machine."""
    programs = max(1, H100_SMS * _BLOCKS_AN_SM // kv_heads)
    return Target(query_heads, kv_heads, head_dim, dtype_bytes, num_programs=programs)
