"""The papers' tables and figures: for each, its workloads, its methods and its claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kernel.methods import Method, make_method
from benchmarks.kernel.tree_workloads import Workload
from benchmarks.papers import workloads as made
from benchmarks.papers.methods import DenseMask, FixedDivision, RadixAttention, Tuned, WholeContext
from deft_backend.policies import POLICY_NAMES, get_policy
from deft_backend.policies.deft_flatten import DeftFlatten
from deft_backend.policies.deft_node import DeftNodeChunk

DEFT = ("radix-attention", "flash-decoding", "dense-mask", "deft-node", "deft-node-chunk",
        "deft-flatten", "auto")  # fmt: skip
EVERY = (*POLICY_NAMES, "fa3", "flashinfer", "cascade", "radix-attention")
FLASHFORGE = ("fa3", "flashinfer", "flash-decoding", "flashforge", "auto")
CHUNKS = (32, 64, 128, 256, 512)
DIVISIONS = (1, 2, 4, 8, 16, 32, 64)
GQA, MHA = (32, 8), (32, 32)


@dataclass(frozen=True)
class Table:
    """One table or figure of a paper.

    Attributes
    ----------
    name : str
        By which the command selects it; the record is ``papers-<name>.json``.
    place, claim : str
        Where the paper shows it, and what the paper says there.
    workloads : callable
        Takes the folder of DeFT's recordings. Workloads of one `set` are steps of one workload of
        the paper: their times are averaged.
    methods : sequence of str
    heads : sequence of (query heads, KV heads)
    traces : bool
        Whether the workloads are recordings.
    """

    name: str
    place: str
    claim: str
    workloads: Callable[[Path], list[Workload]]
    methods: Sequence[str]
    heads: Sequence[tuple[int, int]] = (GQA,)
    traces: bool = False


def _splits(traces: Path) -> list[Workload]:
    return [*made.few_shot(), *made.thoughts(traces), *made.token_trees(traces)]


def _prompts(traces: Path) -> list[Workload]:
    lengths = (1000, 5000, 8000, 10000)
    sorting = [
        workload
        for length in lengths
        for workload in made.thoughts(traces, names=made.THOUGHTS[:1], prompt=length)
    ]
    return [*sorting, *made.prompts((1000, 5000, 10000, 15000, 20000), (32, 64))]


def _chunk_sizes(traces: Path) -> list[Workload]:
    return [*made.prompts((1000, 4000, 16000), (32, 64, 128)), *made.few_shot((30,))]


def _every_step(traces: Path) -> list[Workload]:
    names = made.THOUGHTS[:1]
    steps = made.thoughts(traces, samples=48, names=names)
    return [_alone(workload) for workload in steps]


def _alone(workload: Workload) -> Workload:
    return Workload(workload.name, workload.name, workload.describe)


TABLES = (
    Table(
        "deft-splits", "DeFT, Tables 5, 6 and 16",
        "DeFT-Flatten takes 0.28 to 0.87 of Radix Attention's time, and is faster than Node-Chunk "
        "and Node on every workload",
        _splits, DEFT, traces=True,
    ),
    Table(
        "deft-prompts", "DeFT, Tables 7 and 18, Figures 16 to 18",
        "attention is 1.39, 1.71, 1.97 and 1.84 times as fast as Radix Attention for prompts of "
        "1,000 to 10,000 tokens",
        _prompts, DEFT, traces=True,
    ),
    Table(
        "deft-widths", "DeFT, Figure 14",
        "the wider the tree, the larger the speed-up; the dense mask grows fastest",
        lambda traces: made.few_shot((10, 20, 30, 40, 50, 60, 70, 80, 90, 100)), DEFT,
    ),
    Table(
        "deft-chunks", "DeFT, Figure 15",
        "Flatten is faster than Node-Chunk at every chunk size; the best size depends on lengths "
        "and queries",
        _chunk_sizes,
        [f"{policy}/{chunk}" for policy in ("deft-node-chunk", "deft-flatten") for chunk in CHUNKS],
    ),
    Table(
        "deft-iterations", "DeFT, Figure 13",
        "Flatten is about 1.75 times as fast as Node in sorting, more where nodes differ more in "
        "length",
        _every_step, ("deft-node", "deft-flatten", "auto"), traces=True,
    ),
    Table(
        "deft-architectures", "DeFT, Tables 19 to 21",
        "Flatten is faster than Radix Attention with MHA and with GQA",
        lambda traces: [*made.few_shot((30,)), *made.prompts((4000,), (64,))], DEFT,
        ((32, 32), (64, 8), (32, 8)),
    ),
    Table(
        "fasttree-trees", "FastTree, kernel evaluation",
        "FastTree's kernel is faster than FlashInfer, DeFT's and cascades on all 15 trees",
        lambda traces: made.of_set("fasttree"), EVERY, (GQA, MHA),
    ),
    Table(
        "flashforge-sweeps", "FlashForge, section 6.1, Figure 5",
        "1.9 times as fast as FlashDecoding on average, up to 3.6 times",
        lambda traces: made.of_set("flashforge"), FLASHFORGE, (MHA,),
    ),
    Table(
        "flashforge-components", "FlashForge, Figure 8",
        "unbalanced: 38.0 ms without either, 16.7 with the tree, 5.9 with division, 3.5 with both",
        lambda traces: [w for w in made.of_set("flashforge") if w.name in ("shape-DT", "depth-5")],
        (WholeContext.name, "deft-node", "flash-decoding", "flashforge"), (MHA,),
    ),
    Table(
        "flashforge-division", "FlashForge, Figure 9",
        "the solver's division is at least as fast as the best fixed number of chunks",
        lambda traces: [
            w for w in made.of_set("flashforge") if w.name in ("shape-DT", "depth-5", "batch-16")
        ],
        (*(f"fixed-division/{chunks}" for chunks in DIVISIONS), "flashforge", "auto"), (MHA,),
    ),
)  # fmt: skip


def method_named(name: str) -> Method:
    """A method of a table: a policy, a policy with its parameter behind a slash, or a baseline."""
    policy, _, parameter = name.partition("/")
    if name == WholeContext.name:
        return Tuned(name, WholeContext())
    if policy == "deft-node-chunk" and parameter:
        return Tuned(name, DeftNodeChunk(int(parameter)))
    if policy == "deft-flatten" and parameter:
        return Tuned(name, DeftFlatten(int(parameter), longer=1))
    if policy == FixedDivision.name:
        return Tuned(name, FixedDivision(int(parameter)))
    if name in POLICY_NAMES:
        return Tuned(name, get_policy(name))
    if name == DenseMask.name:
        return DenseMask()
    if name == RadixAttention.name:
        return RadixAttention()
    return make_method(name)
