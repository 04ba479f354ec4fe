"""`deft explain`: draw a tree in the terminal, with its groups and the bytes that they move."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from deft_backend.cli.errors import fail, reported, state_folder
from deft_backend.settings.policy_names import POLICY_NAMES

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
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw what requests share and the policy's groups; count the bytes that a step reads.

    A tree is planned for one layer of 32 query heads, 8 KV heads and 128 dimensions in 16 bits, on
    one H100.
    """
    from deft_backend.forest import ForestError
    from deft_backend.policies import PolicyError, get_policy
    from deft_backend.telemetry.state_reader import StateError
    from deft_backend.tools.explain import explain as explain_grouping
    from deft_backend.tools.explain import reference_target, render
    from deft_backend.tools.traces.tree_forests import forest_from_levels

    if (tree is not None) == server:
        raise fail("expected exactly one of --tree 'NODES TOKENS' and --server [PORT]")
    if port is not None and not server:
        raise fail(f"unexpected argument {port}; a port goes with --server")
    with reported(ForestError, PolicyError, StateError):
        if tree is None:
            forest, target, layers, title, running = _from_server(port)
        else:
            target, layers, running = reference_target(32, 8, 128, 2), 1, get_policy("auto")
            forest, title = forest_from_levels(tree), f"tree {tree}"
        chosen = running if policy in (None, running.name) else get_policy(policy)
        grouping = chosen.group(forest, target)
        explanation = explain_grouping(forest, grouping, target, layers)
    if as_json:
        content = {"source": title, "policy": chosen.name, **asdict(explanation)}
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
    if isinstance(policy, Invariant) and state.short_tokens:
        policy = Invariant(state.short_tokens)
    return forest, target, state.num_layers, title, policy
