"""`deft explain`: draw a tree in the terminal, with its groups and the bytes that they move."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from deft_backend.cli.errors import fail, reported, state_folder
from deft_backend.cli.shapes import parse_heads
from deft_backend.settings.policy_names import POLICY_NAMES
from deft_backend.shapes import DTYPE_BYTES, SHORT_DTYPES

if TYPE_CHECKING:
    from deft_backend.forest import PrefixForest
    from deft_backend.policies import Policy, Target


def explain(
    port: Annotated[int | None, Argument(metavar="PORT", help="With --server: its port.")] = None,
    tree: Annotated[
        str | None,
        Option(help="'nodes per level, then tokens per node', e.g. '1,4,16 1024,256,32'."),
    ] = None,
    server: Annotated[bool, Option("--server", help="A running server's last batch.")] = False,
    policy: Annotated[
        str | None,
        Option(help=f"One of {', '.join(POLICY_NAMES)}; default: auto, or the server's."),
    ] = None,
    heads: Annotated[str | None, Option(help="Query heads/KV heads; default: 32/8.")] = None,
    head_dim: Annotated[int | None, Option(min=1, help="Head dimension; default: 128.")] = None,
    layers: Annotated[int | None, Option(min=1, help="Layers to sum over; default: 1.")] = None,
    dtype: Annotated[str | None, Option(help="fp16, bf16 or fp32; default: fp16.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw what requests share and the policy's groups; count the bytes that a step reads."""
    from deft_backend.forest import ForestError
    from deft_backend.policies import PolicyError, get_policy
    from deft_backend.telemetry.state_reader import StateError
    from deft_backend.tools.explain import explain as explain_grouping
    from deft_backend.tools.explain import render
    from deft_backend.tools.traces.tree_forests import forest_from_levels

    if (tree is not None) == server:
        raise fail("expected exactly one of --tree 'NODES TOKENS' and --server [PORT]")
    if port is not None and not server:
        raise fail(f"unexpected argument {port}; a port goes with --server")
    shape = {"--heads": heads, "--head-dim": head_dim, "--layers": layers, "--dtype": dtype}
    for option, value in shape.items():
        if value is not None and server:
            raise fail(f"{option} describes a tree; leave it out with --server")
    with reported(ForestError, PolicyError, StateError):
        if tree is None:
            forest, target, layers, title, running = _from_server(port)
        else:
            names = "32/8" if heads is None else heads, "fp16" if dtype is None else dtype
            target = _target(*names, head_dim or 128)
            running, layers = get_policy("auto"), layers or 1
            forest, title = forest_from_levels(tree), f"tree {tree}"
        chosen = running if policy in (None, running.name) else get_policy(policy)
        grouping = chosen.group(forest, target)
        explanation = explain_grouping(forest, grouping, target, layers)
    if as_json:
        content = {"source": title, "policy": chosen.name, **explanation.to_dict()}
        typer.echo(json.dumps(content, indent=2))
        return
    console = Console()
    console.print(f"[bold]{title}[/bold] · policy [cyan]{chosen.name}[/cyan]", highlight=False)
    render(explanation, console)


def _from_server(port: int | None) -> tuple[PrefixForest, Target, int, str, Policy]:
    from deft_backend.policies import Invariant, get_policy
    from deft_backend.telemetry.state_reader import (
        StateError,
        read_state,
        server_file,
        shown_forest,
    )
    from deft_backend.tools.explain import server_target

    folder = state_folder()
    path = server_file(folder, port)
    state = read_state(path)
    if not state.counters.steps_tree:
        raise StateError(f"{path}: the server has decoded no batch with tree attention yet")
    forest = shown_forest(path)
    target = server_target(state, forest.page_size)
    title = f"server on port {state.port}, its last planned batch"
    policy = get_policy(state.policy if state.policy in POLICY_NAMES else "auto")
    if isinstance(policy, Invariant) and state.chunk_tokens:
        policy = Invariant(state.chunk_tokens)
    return forest, target, state.num_layers, title, policy


def _target(heads: str, dtype: str, head_dim: int) -> Target:
    query_heads, kv_heads = parse_heads(heads)
    if query_heads % kv_heads:
        raise fail(f"--heads is {heads!r}; expected query heads that are a multiple of KV heads")
    if dtype not in SHORT_DTYPES:
        raise fail(f"--dtype is {dtype!r}; expected one of {', '.join(SHORT_DTYPES)}")
    from deft_backend.tools.explain import reference_target

    return reference_target(query_heads, kv_heads, head_dim, DTYPE_BYTES[SHORT_DTYPES[dtype]])
