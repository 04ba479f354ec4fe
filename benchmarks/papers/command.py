"""``python -m benchmarks papers``: what the papers' tables need besides sets of ``kernel``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.e2e.command import (
    ERRORS,
    CheckpointOption,
    HostArguments,
    ModelChoice,
    TogetherOption,
    listed,
    measure_servers,
    served_model,
)
from benchmarks.e2e.launch import HOSTS, Launch, checked_backends
from benchmarks.kernel.command import make_setup
from benchmarks.kernel.kernel_rows import averaged
from benchmarks.kernel.measure_case import DTYPES, measure
from benchmarks.kernel.sets import read_set
from benchmarks.kernel.tree_workloads import cases_of
from benchmarks.papers.counters import METHODS, TREES, NoCountersError, counted
from benchmarks.papers.steps import MODELS, dense_us, step_row
from benchmarks.papers.workloads import (
    FEW_SHOT,
    PROMPT_TOKENS,
    THOUGHTS,
    TOKEN_TREES,
    every_step,
    few_shot_steps,
)
from benchmarks.policy_gaps import estimate_rows, target_on_hopper
from benchmarks.row_files import write_rows
from deft_backend.cli.errors import fail, host_arguments, reported, say
from deft_backend.files.provenance import provenance
from deft_backend.forest import PrefixForest
from deft_backend.planner import PlanCapacity, plan_grouping
from deft_backend.planner.encoding import ITEM_ORDER, OPEN_END
from deft_backend.policies import get_policy
from deft_backend.settings.policy_names import POLICY_NAMES
from deft_backend.tools.traces.arrivals import TraceError

STEPS, IO, WORK, COUNTERS, SERVERS = "deft-steps", "deft-io", "deft-work", "counters", "servers"
ESTIMATES = "estimates"
TABLES = (STEPS, IO, WORK, COUNTERS, ESTIMATES, SERVERS)
POLICIES_RECORD = Path("docs/results/policies-h200.json")
PLACES = {
    STEPS: "DeFT, Figure 4, Tables 5 and 8",
    IO: "DeFT, Table 17",
    WORK: "DeFT, Tables 6, 12 and 16",
    ESTIMATES: "FlashForge, section 5.2",
}


def papers(
    table: Annotated[str, typer.Option(help=f"{', '.join(TABLES)}; others: kernel --set.")],
    host_args: HostArguments = None,
    traces: Annotated[Path | None, typer.Option(help="Folder of DeFT's recorded trees.")] = None,
    host: Annotated[str | None, typer.Option(help="Table servers: sglang or vllm.")] = None,
    sides: Annotated[
        str,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="Table servers: one server for each policy or backend of the host, such as "
            "auto,deft-flatten,triton. The host's default backend always has one.",
        ),
    ] = "auto",
    checkpoint: CheckpointOption = None,
    together: TogetherOption = False,
    out: Annotated[Path, typer.Option(help="Folder for papers-<table>.json.")] = Path(
        "reports/papers"
    ),
) -> None:
    """Whole servers, whole steps, KV read, and hardware counters, as the papers' tables have them.

    `kernel --set deft-splits` and the like measure the tables of kernels.
    """
    options = host_arguments(host_args)
    if table not in TABLES:
        raise fail(f"--table is {table!r}; expected one of {', '.join(TABLES)}")
    if table not in (COUNTERS, ESTIMATES) and traces is None:
        raise fail(f"{table} needs DeFT's recorded trees; add --traces FOLDER")
    if options and table != SERVERS:
        raise fail("options of the host are for the table servers")
    if table == SERVERS:
        if host is None or host not in HOSTS:
            raise fail("the table servers runs a host; name it with --host sglang or --host vllm")
        _servers(host, listed(sides), traces, out, checkpoint, options, together=together)
        return
    if table not in (IO, WORK, ESTIMATES) and not torch.cuda.is_available():
        raise fail(f"{table} needs an NVIDIA GPU, and torch finds none")
    console = Console()
    rows: list[dict[str, Any]] = []
    header = {**provenance(), "table": table, "place": PLACES.get(table)}
    with reported(TraceError, NoCountersError):
        makers: dict[str, Callable[[], Any]] = {
            STEPS: lambda: _steps(traces or Path()),
            IO: lambda: counted_io(traces or Path()),
            WORK: lambda: counted_work(traces or Path()),
            COUNTERS: _counters,
            ESTIMATES: lambda: estimate_rows(POLICIES_RECORD),
        }
        for row in makers[table]():
            rows.append(row)
            write_rows(out / f"papers-{table}.json", rows, header)
            say(console, str(row))


def _steps(traces: Path) -> Any:
    """The parts of a step of whole models."""
    heads = ",".join(sorted({shape.heads for shape in MODELS.values()}))
    spec, workloads = read_set("deft-architectures", traces, [f"heads={heads}"])
    setup = make_setup(spec, torch.device("cuda"), quick=False)
    shapes = [(shape.query_heads, shape.kv_heads) for shape in MODELS.values()]
    attention = averaged(list(measure(cases_of(workloads, sorted(set(shapes)), 0), setup)))
    for model, shape in MODELS.items():
        for row in (row for row in attention if row["heads"] == shape.heads):
            dense = dense_us(shape, round(row["batch"]), DTYPES[spec.dtype], setup.rep_ms)
            yield step_row(model, row, *dense, baseline="flash-decoding")


def _counters() -> Any:
    """DRAM bytes and utilisation (FlashForge, Figure 6; DeFT, Table 14)."""
    for tree in TREES:
        for method in METHODS:
            yield counted(method, tree, "32/8")


def counted_io(traces: Path) -> Any:
    """KV read over all steps of all recordings and few-shot prompts, query by query and shared.

    In tokens, because a token has the same bytes for both. ``medusa_over_kv`` is what Medusa's
    attention moves besides: it reads or writes a number for each query and token eight times, and a
    token has keys and values of 128 numbers. ``node_std`` is the mean of the standard deviation of
    the nodes' lengths (Figure 13).
    """
    every: dict[str, Iterable[PrefixForest]] = {
        name: every_step(traces / f"{name}.json") for name in (*THOUGHTS, *TOKEN_TREES)
    }
    every |= {f"b={width}": few_shot_steps(width) for width in FEW_SHOT}
    for name, forests in every.items():
        attended = stored = steps = dense = 0
        spread = 0.0
        for forest in forests:
            attended += forest.tokens_attended
            dense += forest.batch_size * forest.tokens_stored
            stored += forest.tokens_stored
            spread += float(np.std(forest.length))
            steps += 1
        yield {
            "workload": name,
            "steps": steps,
            "tokens_attended": attended,
            "tokens_stored": stored,
            "saved_percent": round(100 * (1 - stored / attended), 2),
            "medusa_over_kv": round(8 * dense / (2 * 128 * stored), 2),
            "node_std": round(spread / max(1, steps), 1),
        }


def counted_work(traces: Path) -> Any:
    """What the plans of each policy do on DeFT's workloads, summed over the steps.

    - ``loaded``: tokens that items load, over tokens stored.
    - ``products``: query vectors times tokens in the tiles, over the products that count.
    - ``chunk_tokens``: mean tokens of an item; ``items`` and ``results`` are of a step.
    """
    _, workloads = read_set("deft-splits", traces)
    target = target_on_hopper("32/8")
    limits = PlanCapacity.for_batch(256, max(target.tile_programs)).limits
    for name in dict.fromkeys(workload.set for workload in workloads):
        forests = [workload.forest for workload in workloads if workload.set == name]
        for policy in ("flash-decoding", "deft-node", "deft-node-chunk", "deft-flatten", "auto"):
            loaded = products = items = results = 0
            for forest in forests:
                grouping = get_policy(policy).group(forest, target.within(limits))
                plan = plan_grouping(grouping, forest, target)
                lens = forest.seq_lens[plan.segment_request]
                end = np.where(plan.segment_end == OPEN_END, lens, plan.segment_end)
                parts = (end - plan.segment_start).astype(np.int64)
                tokens = np.add.reduceat(parts, plan.item_segment_ptr[:-1])
                height = np.array([*target.tile_heights, 0])[list(ITEM_ORDER)]
                products += int(np.repeat(height, np.diff(plan.tile_ptr)) @ tokens)
                loaded, items = loaded + int(tokens.sum()), items + plan.num_items
                results += plan.num_partials
            attended = sum(forest.tokens_attended for forest in forests)
            yield {
                "workload": name,
                "policy": policy,
                "items": round(items / len(forests), 1),
                "results": round(results / len(forests), 1),
                "chunk_tokens": round(loaded / items),
                "loaded": round(loaded / sum(forest.tokens_stored for forest in forests), 3),
                "products": round(products / (attended * target.query_vectors), 3),
            }


def _servers(
    host: str,
    sides: Sequence[str],
    traces: Path | None,
    out: Path,
    checkpoint: Path | None,
    options: Sequence[str],
    *,
    together: bool,
) -> None:
    """Whole servers: DeFT's end-to-end tables, and FastTree's comparison with SGLang.

    A server for each policy and backend, and the host's default backend last. All add to one file
    of rows, and get the same requests: the papers' reasoning trees, few-shot prompts and documents.
    """
    chosen = HOSTS[host]
    on_gpu = chosen.on_gpu()
    policies = [name for name in sides if name in POLICY_NAMES]
    others = [name for name in sides if name not in (*POLICY_NAMES, chosen.reference())]
    choice = ModelChoice(weights="dummy" if on_gpu else "random", checkpoint=checkpoint)
    with reported(*ERRORS), served_model(chosen, choice) as model:
        backends = checked_backends(chosen, (chosen.ours, *others, chosen.reference()))
        launch = Launch(chosen, model, options)
        measure_servers(
            [
                *((replace(launch, policy=policy), [chosen.ours]) for policy in policies),
                (launch, backends[1:]),
            ],
            ["grid", "documents", "trees"],
            [f"grid:{PROMPT_TOKENS},{width},64" for width in FEW_SHOT] if on_gpu else [],
            None,
            2,
            traces,
            out / f"papers-servers-{host}.json",
            reference=chosen.reference(),
            together=together,
        )
