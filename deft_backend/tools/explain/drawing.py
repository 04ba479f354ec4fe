"""Draw an explanation in the terminal: the forest with its groups, and a table of figures."""

from collections.abc import Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.tree import Tree

from deft_backend.forest import VIRTUAL_ROOT
from deft_backend.telemetry.decode_log import counted
from deft_backend.tools.explain.explanation import Explanation

MAX_NODES, MAX_SIBLINGS = 60, 8  # nodes drawn, and children of one node


def render(explanation: Explanation, console: Console) -> None:
    """Print the tree of nodes with the groups that read them, then the totals.

    "… n more" lines count what a large forest holds besides. Empty leaves are counted on the line
    of their parent.
    """
    console.print(_tree(explanation))
    console.print(_totals(explanation))


def _tree(explanation: Explanation) -> Tree:
    below: dict[int, list[int]] = {}
    for at, node in enumerate(explanation.nodes):
        below.setdefault(node.parent, []).append(at)
    root = Tree(
        f"batch of {explanation.batch_size} · {explanation.tokens_stored:,} tokens stored · "
        f"{explanation.tokens_attended:,} attended",
        highlight=False,
    )
    room = MAX_NODES
    # Choose nodes breadth first: of a large forest, the drawing omits deep nodes, not the last
    # trees.
    frontier: list[tuple[int, Tree]] = [(VIRTUAL_ROOT, root)]
    for parent, drawn in frontier:
        children = below.get(parent, [])
        shown = [at for at in children if explanation.nodes[at].tokens]
        empty = len(children) - len(shown)
        if parent == VIRTUAL_ROOT and empty:
            drawn.add(f"[dim]{counted(empty, 'request')} without tokens[/dim]")
        take = shown[: min(MAX_SIBLINGS, max(0, room))]
        room -= len(take)
        for at in take:
            frontier.append((at, drawn.add(_label(explanation, at, below.get(at, [])))))
        if len(shown) > len(take):
            rest = shown[len(take) :]
            tokens = sum(explanation.nodes[at].tokens for at in rest)
            drawn.add(f"[dim]… {len(rest)} more · {tokens:,} tokens[/dim]")
    return root


def _label(explanation: Explanation, at: int, children: Sequence[int]) -> str:
    node = explanation.nodes[at]
    stop = node.start + node.tokens
    label = (
        f"[bold]{counted(node.tokens, 'token')}[/bold] {node.start:,}–{stop:,} "
        f"of request {node.request} · "
        f"{counted(node.queries, 'query', 'queries')} · {_readers(node.groups)}"
    )
    ending = sum(1 for child in children if not explanation.nodes[child].tokens)
    if ending:
        label += f" [dim]({counted(ending, 'request ends', 'requests end')} here)[/dim]"
    return label


def _readers(groups: Sequence[int]) -> str:
    """Groups by number; several in a row as a range."""
    runs: list[list[int]] = []
    for group in groups:
        if runs and group == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], group]
        else:
            runs.append([group])
    named = ["–".join(map(str, run)) for run in runs[:3]]
    more = [f"… {len(runs) - 3} more"] if len(runs) > 3 else []
    noun = "group" if len(groups) == 1 else "groups"
    return f"[cyan]{noun} {', '.join(named + more)}[/cyan]"


def _totals(explanation: Explanation) -> Table:
    e = explanation
    layers = counted(e.num_layers, "layer")
    table = Table(title=f"One decode step, {layers}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in (
        ("share F_s (attended / stored)", f"{e.share:.2f}"),
        ("groups", f"{len(e.groups):,}"),
        ("items (group × query tile)", f"{e.num_items:,}"),
        ("KV read, each group once", decimal(e.kv_bytes)),
        ("KV read as issued by the tiles", decimal(e.kv_bytes_issued)),
        ("KV read, query by query", decimal(e.kv_bytes_flash_decoding)),
        ("KV reduction", f"{e.kv_reduction_percent:.2f} %"),
        ("queries read", decimal(e.query_bytes)),
        ("masks read", decimal(e.mask_bytes)),
        ("partial results, written and read", decimal(e.partial_bytes)),
        ("estimated time, one layer", f"{e.estimated_ms:.3f} ms"),
    ):
        table.add_row(name, value)
    return table
