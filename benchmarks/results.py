"""``docs/results/tables.md``: every figure of the records, drawn from the JSON files beside it.

``docs/reproduction.md`` repeats some of its tables, between ``<!-- table: TITLE -->`` and
``<!-- end -->``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import correlation, median
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.row_files import RowsError

FOLDER = Path(__file__).parents[1] / "docs/results"
PAGE = FOLDER / "tables.md"
REPRODUCTION = FOLDER.parent / "reproduction.md"

OURS = ("deft", "DEFT", "CUSTOM")
"""Backends of servers that decode with this plugin."""

POLICIES = (
    "auto",
    "fasttree",
    "flashforge",
    "deft-node-chunk",
    "deft-flatten",
    "flash-decoding",
    "deft-node",
)

HEAD = """# Tables of the records

`python -m benchmarks results` writes this page from the JSON files in this folder. Do not edit it.
Each record belongs to its commit and its machine. A ratio is the time of tree attention over the
time of the named peer: below 1, tree attention is faster. "0.17–0.40" is the range over the cases.
"Steady" compares the time between tokens while all requests decode. Answers of two kernels differ
by rounding: ties are such tokens, and wrong tokens differ by more. A blank cell repeats the one
above it.
"""


class Run(NamedTuple):
    """One run of a record: a file holds one or several."""

    name: str
    number: int | None
    header: Mapping[str, Any]
    content: Mapping[str, Any]

    @property
    def label(self) -> str:
        number = "" if self.number is None else f", run {self.number}"
        gpu = "" if self.gpu.lower() in self.name else f", {self.gpu}"
        return f"[{self.name}]({self.name}.json){number}{gpu}"

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows = self.content.get("rows", self.content.get("modes", []))
        return rows if isinstance(rows, list) else []

    @property
    def gpu(self) -> str:
        said = _first(self.header, "device", "gpu") or "CPU"
        found = re.search(r"\b([A-Z]+\d+\w*)\b", said.removeprefix("NVIDIA "))
        return found[1] if found and not said.lower().startswith("cpu") else "CPU"


Line = tuple[str, ...]


class Section(NamedTuple):
    """One table of the page: which records it has, its columns, and the lines of one run."""

    title: str
    records: str
    columns: str
    lines: Callable[[Run], Iterable[Line]]


def read_runs(folder: Path) -> list[Run]:
    """Every run of every record, sorted by name and then in the order of the file."""
    runs = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, list):
            content = {"header": content[-1], "rows": content}
        parts = content["runs"] if set(content) == {"runs"} else [content]
        for number, part in enumerate(parts, 1):
            header = part.get("header", part)
            runs.append(Run(path.stem, number if len(parts) > 1 else None, header, part))
    return runs


def draw_page(folder: Path) -> str:
    """The whole page, in Markdown."""
    runs = read_runs(folder)
    parts = [HEAD]
    for section in SECTIONS:
        lines = [
            line
            for run in runs
            if re.fullmatch(section.records, run.name)
            for line in _without_repeats(run.label, section.lines(run))
        ]
        if lines:
            columns = ("record", *section.columns.split("|"))
            parts.append(f"## {section.title}\n\n{_table(columns, lines)}")
    records = (_record_line(group) for group in _grouped(runs, lambda run: run.name).values())
    columns = ("record", "GPU", "commits", "versions")
    parts.append(f"## Every record\n\n{_table(columns, records)}")
    return "\n".join(parts)


def with_tables(text: str, page: str) -> str:
    """A page's `text`, in which each table is drawn anew from `page`, which has all tables."""

    def table(found: re.Match[str]) -> str:
        drawn = page.split(f"## {found[1]}\n\n")[1].split("\n\n")[0].rstrip()
        linked = re.sub(r"\]\((?=[\w-]+\.json)", "](results/", drawn)
        return f"<!-- table: {found[1]} -->\n\n{linked}\n\n<!-- end -->"

    return re.sub(r"(?s)<!-- table: ([^\n]+) -->.*?<!-- end -->", table, text)


def _without_repeats(label: str, lines: Iterable[Line]) -> Iterator[Line]:
    """Lines of a run behind its label; label and first cell are blank where they repeat."""
    above = None
    for first, *rest in lines:
        yield "" if above else label, "" if first == above else first, *rest
        above = first


def _table(columns: Sequence[str], lines: Iterable[Line]) -> str:
    rows = [columns, tuple("---" for _ in columns), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)


def _first(header: Mapping[str, Any], *names: str) -> Any:
    """A field of the header, or of the first part of a run in parts."""
    parts = [part for part in header.get("runs", []) if isinstance(part, dict)]
    for place in (header, *parts):
        for name in names:
            if place.get(name) is not None:
                return place[name]
    return None


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _range(values: Sequence[float | None], digits: int = 2) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    low, high = (f"{value:.{digits}f}" for value in (min(known), max(known)))
    return low if low == high else f"{low}–{high}"


def _ratios(pairs: Iterable[tuple[float | None, float | None]]) -> list[float]:
    return [ours / theirs for ours, theirs in pairs if ours and theirs]


def _grouped(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _record_line(runs: Sequence[Run]) -> Line:
    """All runs of one file, with the hosts' versions; without a host, with Triton's."""

    def installed(*names: str) -> list[str]:
        return [
            f"{name} {version.partition('+')[0]}"
            for name in names
            for run in runs
            if (version := (_first(run.header, "versions") or run.header).get(name))
        ]

    versions = installed("sglang", "vllm") or installed("triton")
    commits = [str(_first(run.header, "commit") or "–").split()[0][:8] for run in runs]
    return (
        f"[{runs[0].name}]({runs[0].name}.json)",
        ", ".join(dict.fromkeys(run.gpu for run in runs)),
        ", ".join(dict.fromkeys(commits)),
        ", ".join(dict.fromkeys(versions)) or "–",
    )


def _server_lines(run: Run) -> Iterator[Line]:
    """Ours and each peer on the cases that both served, one line a workload."""
    cases = ("host", "model", "tp", "options", "workload", "prefix", "branches", "suffix", "gen")
    served = _grouped(
        (row for row in run.rows if not row.get("error")),
        lambda row: tuple(row.get(name) for name in cases),
    )
    pairs = [
        (ours, peer)
        for rows in served.values()
        for ours in rows
        if ours["backend"] in OURS
        for peer in rows
        if peer["backend"] not in OURS
    ]
    groups = _grouped(pairs, lambda pair: _server_case(pair[0], pair[1]))
    for (host, model, workload, ours, peer), both in groups.items():
        times = [(_time_per_token(a), _time_per_token(b)) for a, b in both]
        steady = ((a["detail"].get("steady_ms"), b["detail"].get("steady_ms")) for a, b in both)
        shown = f"{times[0][0]:.2f}, {times[0][1]:.2f}" if len(both) == 1 and all(times[0]) else "–"
        yield (
            f"{host}: {model}",
            workload,
            f"{ours} / {peer}",
            str(len(both)),
            shown,
            _range(_ratios(times)),
            _range(_ratios(steady)),
            _range(_ratios((a["ttft_ms"], b["ttft_ms"]) for a, b in both)),
        )


def _server_case(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> tuple[str, ...]:
    workload = re.sub(r"\[\d+\]$", "", ours["workload"])
    options = ours["options"]
    policy = f" {ours['policy']}" if ours.get("policy") else ""
    if policy:
        workload = workload.partition(" ")[0]
    elif workload in ("few-shot", "rollouts") or workload.startswith("agents"):
        workload += f", {ours['prefix']:,} × {ours['branches']}"
    elif workload == "beams":
        workload += f" on {ours['prefix']:,}"
    if drafts := re.search(r"\(drafts ([^)]*)\)|--speculative-algorithm (\w+)", options):
        workload += f", drafts {drafts[1] or drafts[2]}"
    elif "--speculative-config" in options:
        workload += ", drafts"
    if cache := re.search(r"--kv-cache-dtype (\S+)", options):
        workload += f", {cache[1]}"
    model = re.sub(r", (dummy|random) weights|, bfloat16", "", ours["model"])
    if (tp := ours.get("tp", 1)) > 1:
        model += f", {tp} GPUs"
    return ours["host"], model, workload, f"{ours['backend']}{policy}", peer["backend"]


def _time_per_token(row: Mapping[str, Any]) -> float | None:
    """Milliseconds; of rollouts, whose answers differ in length, the whole time by the tokens."""
    if row["tpot_ms"] is not None:
        return float(row["tpot_ms"])
    total = row["detail"].get("total_s")
    return None if total is None else float(1000 * total / row["detail"]["tokens"])


def _load_lines(run: Run) -> Iterator[Line]:
    """Gaps of ours and of the host's backend, one line for each load and rate: repeats' medians."""
    for (load, rate), rows in _grouped(run.rows, lambda r: (r["load"], r["rate"])).items():
        both = _grouped(rows, lambda row: row["backend"])
        sides = sorted(both, key=lambda name: name not in OURS)
        gaps = (
            ", ".join(f"{median(row['itl_ms'][name] for row in both[side]):.1f}" for side in sides)
            for name in ("mean", "p95", "p99")
        )
        yield " / ".join(sides), load, "all at once" if rate is None else str(rate), *gaps


def _kernel_lines(run: Run) -> Iterator[Line]:
    """Ours over each peer, one line for each set, heads and types."""
    for name, rows in run.content.items():
        if not isinstance(rows, list) or not rows or "us" not in rows[0]:
            continue
        groups = _grouped(rows, lambda row: (row.get("set", "–"), row["heads"], _types(row)))
        for (of_set, heads, types), group in groups.items():
            peers = dict.fromkeys(peer for row in group for peer in row["us"] if peer != "deft")
            shown = _means((row["us"] for row in group), {peer: ("deft", peer) for peer in peers})
            if not peers:
                plans = [us for row in group if isinstance(us := row.get("plan_us"), float)]
                own = _range([row["us"]["deft"] for row in group], 1)
                shown = f"`deft` {own} µs, a plan {_range(plans, 1)} µs"
            title = of_set if name == "rows" else f"{of_set}, {name}"
            yield title, heads, types, str(len(group)), shown


def _means(rows: Iterable[Mapping[str, Any]], pairs: Mapping[str, tuple[str, str]]) -> str:
    """Mean ratio and range of each named pair of methods."""
    times = list(rows)
    shown = []
    for name, (above, below) in pairs.items():
        if ratios := _ratios((row.get(above), row.get(below)) for row in times):
            shown.append(f"`{name}` {_mean(ratios):.2f} ({_range(ratios)})")
    return ", ".join(shown)


def _types(row: Mapping[str, Any]) -> str:
    query, cache = row["dtype"], row.get("kv_dtype", row["dtype"])
    return query if query == cache else f"{query}, {cache} cache"


def _policy_lines(run: Run) -> Iterator[Line]:
    planner_of = run.header.get("planner")
    for (planner, heads), rows in _grouped(
        run.rows, lambda r: (r.get("planner", planner_of), r["heads"])
    ).items():
        times = [{"auto": row["us"].get("deft"), **row["us"]} for row in rows]
        means = [
            _mean(_ratios((us.get(policy), us["auto"]) for us in times)) for policy in POLICIES[1:]
        ]
        slower = [us["auto"] / min(filter(None, us.values())) for us in times]
        above = (sum(value > bar for value in slower) for bar in (1.02, 1.05))
        worst = f"{' and '.join(map(str, above))} of {len(rows)}; {max(slower):.2f}"
        yield planner, heads, *(f"{mean:.2f}" for mean in means), worst


def _gap_lines(run: Run) -> Iterator[Line]:
    """Costs over the optimum of each model, one line for each model and policy."""
    for heads, rows in _grouped(run.rows, lambda row: row["heads"]).items():
        for model in ("edges", "makespan", "measured"):
            names = dict.fromkeys(name for row in rows for name in row[model])
            for name in names:
                found = [row[model][name] for row in rows if name in row[model]]
                above = sum(value > 1.005 for value in found)
                shown = f"{_mean(found):.2f} ({_range(found)})"
                yield heads, model, f"`{name}`", str(len(found)), shown, str(above)


def _invariant_lines(run: Run) -> Iterator[Line]:
    for shape, rows in _grouped(run.rows, lambda row: row["shape"]).items():
        times = [row["invariant_over_auto"] for row in rows if row["what"] == "times"]
        bits = [row for row in rows if row["what"] == "bits"]
        compared, differ = (sum(row[name] for row in bits) for name in ("requests", "differ"))
        over = f"{_mean(times):.2f} ({_range(times)})" if times else "–"
        yield shape, f"{compared:,}", str(differ), str(len(times)), over


def _trust_lines(run: Run) -> Iterator[Line]:
    for row in run.rows:
        numbers = (row["mean_difference"], row["largest_difference"], row["kl"])
        yield (row["mode"], *(f"{number:.1e}" for number in numbers), f"{row['generation_s']:.2f}")


def _paper_lines(run: Run) -> Iterator[Line]:
    """Methods over `auto`, or over the first method where `auto` was not timed."""
    place = str(run.header.get("place", "–"))
    for heads, rows in _grouped(
        (row for row in run.rows if "us" in row or "step_ms" in row), lambda row: row["heads"]
    ).items():
        times = [row.get("us") or row["step_ms"] for row in rows]
        methods = list(dict.fromkeys(method for of_row in times for method in of_row))
        base = "auto" if "auto" in methods else methods[0]
        shown = _means(times, {method: (method, base) for method in methods if method != base})
        if run.header.get("table") == "deft-iterations" and "node_std" in rows[0]:
            gains = [us["deft-node"] / us["deft-flatten"] for us in times]
            ranks = correlation(_ranks([row["node_std"] for row in rows]), _ranks(gains))
            shown += f"; rank correlation of Flatten's gain and the nodes' spread {ranks:.2f}"
        yield place, heads, str(len(rows)), f"`{base}`", shown


def _ranks(values: Sequence[float]) -> list[float]:
    return [float(sum(other < value for other in values)) for value in values]


def _latent_lines(run: Run) -> Iterator[Line]:
    rows = [row for row in run.rows if row["us"].get("deft")]
    for (tokens, heads), group in _grouped(
        rows, lambda row: (row["query_tokens"], row["heads"])
    ).items():
        columns = [
            _range(
                _ratios(
                    (row["us"]["deft"], row["us"].get(peer))
                    for row in group
                    if bool(row["shared"]) == shared
                )
            )
            for peer in ("host", "flashinfer")
            for shared in (True, False)
        ]
        yield str(heads), str(tokens), str(len(group)), *columns


def _start_lines(run: Run) -> Iterator[Line]:
    for row in run.rows:
        if row["seconds"] is not None:
            seconds = f"{row['seconds']:.1f}"
            yield row["host"], str(row["tp"]), row["backend"], row["cache"], seconds


def _answer_lines(run: Run) -> Iterator[Line]:
    """Tokens compared with the host's own, the controls by themselves."""
    compared = [(row, answers) for row in run.rows if (answers := _answers(row)) is not None]
    groups = _grouped(compared, lambda pair: (_host(run, pair[0]), _is_control(pair[0])))
    for (host, control), group in groups.items():
        tokens, ties, wrong = (sum(answers[index] for _, answers in group) for index in range(3))
        who = "the host against itself" if control else "tree attention"
        yield host, who, f"{tokens:,}", f"{ties:,}", str(wrong)


def _host(run: Run, row: Mapping[str, Any]) -> str:
    if "host" in row:
        return str(row["host"])
    server = row.get("server", "")
    versions = row.get("versions") or _first(run.header, "versions") or {}
    vllm = "vLLM" in server or "FLASH_ATTN" in server or "sglang" not in versions
    return "vllm" if vllm and "SGLang" not in server else "sglang"


def _is_control(row: Mapping[str, Any]) -> bool:
    """Whether no side of the comparison decoded with this plugin."""
    other = row.get("backend") not in (None, *OURS)
    return (
        other or bool(row.get("control")) or str(row.get("variant")).endswith(("-control", "-twin"))
    )


def _answers(row: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Tokens compared, tokens that differ by a tie, and wrong tokens; None if none were."""
    if "wrong" in row and ("tokens" in row or "checked_tokens" in row):
        return row.get("checked_tokens", row.get("tokens")), row.get("ties", 0), row["wrong"]
    if "tokens_checked" in row:
        return row["tokens_checked"], row["ties"], row["tokens_wrong"]
    found = [numbers for part in row.values() if isinstance(part, dict) for numbers in _parts(part)]
    if not found:
        return None
    tokens, ties, wrong = (sum(column) for column in zip(*found, strict=True))
    return tokens, ties, wrong


def _parts(part: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    if "wrong" in part and "tokens" in part:
        yield part["tokens"], part.get("ties", 0), part["wrong"]
    else:
        for value in part.values():
            if isinstance(value, dict):
                yield from _parts(value)


def _mutant_lines(run: Run) -> Iterator[Line]:
    """By folder: mutants that change behaviour, and how many the tests caught, then and now."""
    names = ("mutants", "equivalent", "caught", "caught since")
    every = {name: sum(row[name] for row in run.rows) for name in names}
    for row in (*run.rows, {"folder": "all", **every}):
        counted = row["mutants"] - row["equivalent"]
        now = row["caught"] + row["caught since"]
        rates = (f"{caught / counted:.0%}" for caught in (row["caught"], now) if counted)
        yield row["folder"], str(counted), str(row["caught"]), str(now), " → ".join(rates)


SECTIONS = (
    Section(
        "Servers, end to end",
        "e2e-.*|papers-servers-.*",
        "host: model|workload|backends|cases|ms per token|ratio|steady|first token",
        _server_lines,
    ),
    Section(
        "Servers under load",
        "load-.*",
        "backends|load|requests/s|gap: mean ms|p95|p99",
        _load_lines,
    ),
    Section(
        "Kernels, over each peer's time",
        "kernel-.*|verify-.*",
        "set|heads|types|cases|mean (range)",
        _kernel_lines,
    ),
    Section(
        "MLA kernels, over each peer's time",
        "mla-.*",
        "heads|query tokens|cases|host: shared|nothing shared|FlashInfer: shared|nothing shared",
        _latent_lines,
    ),
    Section(
        "Policies, over `auto`'s time",
        "policies-.*",
        f"planner|heads|`{'`|`'.join(POLICIES[1:])}`|`auto` above 1.02 and 1.05; worst",
        _policy_lines,
    ),
    Section(
        "Policies, over the optimum of a cost model",
        "policy-gaps",
        "heads|model|policy|forests|mean (range)|above 1.005",
        _gap_lines,
    ),
    Section(
        "The policy `invariant`",
        "invariant-.*",
        "shape|requests compared|differ|trees|time over `auto`: mean (range)",
        _invariant_lines,
    ),
    Section(
        "Log-probabilities of rollouts, against the trainer's",
        "rollout-trust-.*",
        "mode|mean difference|largest|KL|s a step",
        _trust_lines,
    ),
    Section(
        "The papers' tables",
        "papers-(?!servers).*",
        "table or figure|heads|cases|base|time over the base's: mean (range)",
        _paper_lines,
    ),
    Section(
        "Starts, seconds to the first answer",
        "start-.*",
        "host|ranks|backend|kernel caches|seconds",
        _start_lines,
    ),
    Section(
        "Answers compared with the host's",
        "variants-.*|soak-.*|speculation-.*|models|real-model-.*",
        "host|who|tokens|ties|wrong",
        _answer_lines,
    ),
    Section(
        "Mutants of the sources",
        "faults",
        "folder|mutants|caught|with newer tests|rate",
        _mutant_lines,
    ),
)


def results(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if the page is out of date.")
    ] = False,
) -> None:
    """Write docs/results/tables.md and the tables of docs/reproduction.md from the records."""
    page, before = draw_page(FOLDER), REPRODUCTION.read_text(encoding="utf-8")
    for path, text in ((PAGE, page), (REPRODUCTION, with_tables(before, page))):
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            raise RowsError(f"{path} is out of date; run: python -m benchmarks results")
