"""Count the reads and writes of a grouping, as DeFT counts them and as our kernels issue them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from deft_backend.forest import VIRTUAL_ROOT, PrefixForest
from deft_backend.planner import plan_grouping
from deft_backend.planner.encoding import OPEN_END, SPAN_SHIFT
from deft_backend.planner.plan import Plan
from deft_backend.policies import Grouping, Target
from deft_backend.policies.grouping import estimated_ms, kv_bytes, partial_result_bytes
from deft_backend.telemetry.decode_log import counted, size
from deft_backend.telemetry.state_reader import StateReading

_H100_PROGRAMS = 264  # of one launch: two on each of its 132 SMs

SPAN_BYTES = 4
"""Bytes that a masked tile reads for each KV token on top of keys and values: its span."""


@dataclass(frozen=True)
class GroupFacts:
    tokens: int
    queries: int
    kv_bytes: int


@dataclass(frozen=True)
class NodeFacts:
    parent: int
    request: int
    start: int
    tokens: int
    queries: int
    leaf: bool
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Explanation:
    """The bytes that one decode step moves under a grouping, over all requested layers."""

    batch_size: int
    num_layers: int
    # Tokens of the forest, each counted once (N_tree), and summed over queries (sum of N_i).
    tokens_stored: int
    tokens_attended: int
    share: float  # F_s = sum(N_i) / N_tree (DeFT, Table 11)
    num_items: int  # (group, query tile) pairs, the kernels' units of work
    # (item, query) pairs whose result waits in memory to be merged.
    num_partials: int
    # KV read if each group is read once: ``2 · d_head`` elements a token, KV head and layer (DeFT,
    # Table 12), and as the tiles issue it: each tile of a group loads the group's KV.
    kv_bytes: int
    kv_bytes_issued: int
    kv_bytes_flash_decoding: int  # KV that the Q-guided baseline reads: ``2 · d_head · sum(N_i)``
    kv_reduction_percent: float  # bytes by which `kv_bytes` is below the baseline's
    query_bytes: int  # queries, read once for each item (Table 12: k · l_n · d_head)
    # Bit causal masks read (Table 12: N_tree words). Ours are spans: 4 bytes for each KV token and
    # KV head. Items of one KV range read none, and neither does a first range to which all queries
    # attend.
    mask_bytes: int
    # Partial results, each written once and read once: for each query head an output, its float32
    # log-sum-exp and its float32 scale. The output has 16 bits unless the model is in float32.
    partial_bytes: int
    # Expected time of one layer: the longer of makespan and KV loads, plus merging.
    estimated_ms: float
    nodes: tuple[NodeFacts, ...]
    groups: tuple[GroupFacts, ...]


def explain(
    forest: PrefixForest, grouping: Grouping, target: Target, num_layers: int = 1
) -> Explanation:
    """Count the reads and writes of one decode step.

    - `grouping`: Any policy's grouping of `forest`.
    - `target`: Shape of the attention, and the tiles that items run in.
    - `num_layers`: layers of the model; bytes are sums over them.

    >>> from deft_backend.forest import build_forest
    >>> from deft_backend.policies import Target, get_policy
    >>> forest = build_forest([0, 1], [100], [110, 120])
    >>> target = Target(num_query_heads=8, num_kv_heads=2, head_dim=64)
    >>> e = explain(forest, get_policy("deft-node").group(forest, target), target)
    >>> e.kv_bytes, e.kv_bytes_flash_decoding
    (66560, 117760)
    """
    plan = plan_grouping(grouping, forest, target)
    tokens = grouping.num_tokens()
    token = kv_bytes(1, target) * num_layers
    kv, baseline = int(tokens.sum()) * token, forest.tokens_attended * token
    heads, dim, element = target.num_query_heads, target.head_dim, target.dtype_bytes
    masked = _masked_tokens(plan, forest.seq_lens)
    return Explanation(
        batch_size=forest.batch_size,
        num_layers=num_layers,
        tokens_stored=forest.tokens_stored,
        tokens_attended=forest.tokens_attended,
        share=forest.share,
        num_items=plan.num_items,
        num_partials=plan.num_partials,
        kv_bytes=kv,
        kv_bytes_issued=plan.loaded_tokens(forest.seq_lens) * token,
        kv_bytes_flash_decoding=baseline,
        kv_reduction_percent=100.0 * (1.0 - kv / baseline) if baseline else 0.0,
        query_bytes=len(plan.entry_query) * heads * dim * element * num_layers,
        mask_bytes=masked * SPAN_BYTES * target.num_kv_heads * num_layers,
        partial_bytes=plan.num_partials * partial_result_bytes(heads, dim, element) * num_layers,
        estimated_ms=estimated_ms(grouping, target),
        nodes=_nodes(forest, grouping),
        groups=tuple(
            GroupFacts(t, q, t * token)
            for t, q in zip(tokens.tolist(), grouping.num_queries().tolist(), strict=True)
        ),
    )


def _masked_tokens(plan: Plan, seq_lens: npt.NDArray[np.integer]) -> int:
    end = np.where(plan.segment_end == OPEN_END, seq_lens[plan.segment_request], plan.segment_end)
    single = int(plan.tile_ptr[-2])  # items of several ranges come last
    first = plan.item_segment_ptr[single:-1]
    queries = np.diff(plan.item_query_ptr)[single:]
    masked = np.arange(len(end)) >= plan.item_segment_ptr[single]
    masked[first[plan.segment_span[first] == queries << SPAN_SHIFT]] = False
    return int((end - plan.segment_start)[masked].sum())


def _nodes(forest: PrefixForest, grouping: Grouping) -> tuple[NodeFacts, ...]:
    position = np.empty(forest.batch_size, dtype=np.int64)
    position[forest.order] = np.arange(forest.batch_size)
    leaf_of, parent = forest.leaf[position].tolist(), forest.parent.tolist()
    starts, ends = forest.start.tolist(), forest.end.tolist()

    def touched(request: int, first: int, stop: int, is_open: bool) -> Iterator[int]:
        leaf = node = leaf_of[request]
        while node != VIRTUAL_ROOT and ends[node] > first:
            if starts[node] < stop:
                yield node
            node = parent[node]
        if is_open and starts[leaf] == ends[leaf]:  # an empty leaf will grow here
            yield leaf

    readers: list[dict[int, None]] = [{} for _ in range(forest.num_nodes)]
    group_of = np.repeat(np.arange(grouping.num_groups), np.diff(grouping.segment_ptr))
    ranges = (group_of, grouping.request, grouping.start, grouping.end, grouping.open)
    for group, *ranged in zip(*(column.tolist() for column in ranges), strict=True):
        for node in touched(*ranged):
            readers[node][group] = None
    spans = (forest.parent, forest.request, forest.start, forest.length)
    columns = (*spans, forest.num_queries, forest.is_leaf)
    rows = zip(*(column.tolist() for column in columns), map(tuple, readers), strict=True)
    return tuple(NodeFacts(*row) for row in rows)


def server_target(state: StateReading, page_size: int) -> Target:
    import torch

    from deft_backend.attention.run_inputs import target_of
    from deft_backend.kernels import kernel_configuration
    from deft_backend.shapes import AttentionShape

    heads, kv_heads, head_dim = state.num_query_heads, state.num_kv_heads, state.head_dim
    on_cpu = state.device.startswith("cpu")
    if not on_cpu and not torch.cuda.is_available():
        return reference_target(heads, kv_heads, head_dim, state.dtype_bytes)
    kv_dtype = getattr(torch, state.dtype.removeprefix("torch."))
    # A plan does not depend on which 16 bits the queries have.
    dtype = torch.bfloat16 if kv_dtype.itemsize == 1 else kv_dtype
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    shape = AttentionShape(heads, kv_heads, head_dim, dtype, kv_dtype, device, page_size)
    config = kernel_configuration(head_dim, dtype, device, shape.gqa_group, kv_dtype=kv_dtype)
    return target_of(config, shape)


def reference_target(query_heads: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> Target:
    """The target of one H100, so that an explanation is the same on every machine."""
    programs = max(1, _H100_PROGRAMS // kv_heads)
    return Target(query_heads, kv_heads, head_dim, dtype_bytes, num_programs=programs)


MAX_NODES, MAX_SIBLINGS = 60, 8  # nodes drawn, and children of one node


def render(explanation: Explanation, console: Console) -> None:
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
        ("KV read, each group once", size(e.kv_bytes)),
        ("KV read as issued by the tiles", size(e.kv_bytes_issued)),
        ("KV read, query by query", size(e.kv_bytes_flash_decoding)),
        ("KV reduction", f"{e.kv_reduction_percent:.2f} %"),
        ("queries read", size(e.query_bytes)),
        ("masks read", size(e.mask_bytes)),
        ("partial results, written and read", size(e.partial_bytes)),
        ("estimated time, one layer", f"{e.estimated_ms:.3f} ms"),
    ):
        table.add_row(name, value)
    return table
