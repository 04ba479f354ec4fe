"""Where sharing pays: recorded times per token against the tokens that are not read again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plot_style

RESULTS = Path(__file__).parents[2] / "docs" / "results"

FILES = {
    "e2e-sglang-new": ("SGLang 0.5.23", "fa3", "deft"),
    "e2e-vllm-new": ("vLLM 0.32.0", "FLASH_ATTN", "DEFT"),
    "e2e-sglang-h100-clients": ("SGLang 0.5.17", "fa3", "deft"),
}
"""Files of results: the host, its own backend and ours."""


@dataclass(frozen=True)
class Case:
    """Requests that decode together, with both backends in one run.

    Attributes
    ----------
    host, device, file : str
    requests, shared : int
        Requests, and tokens of the prefix that they share; 0 if they share nothing.
    theirs, ours : float
        Milliseconds per output token.
    """

    host: str
    device: str
    file: str
    requests: int
    shared: int
    theirs: float
    ours: float

    @property
    def saved(self) -> int:
        """Tokens that a step of tree attention does not read again."""
        return self.shared * (self.requests - 1)

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def recorded_cases() -> list[Case]:
    """Every case of one prefix, or none, in the files, by the tokens that are not read again."""
    found = [case for name in FILES for case in _cases(RESULTS / f"{name}.json")]
    return sorted(found, key=lambda case: (case.saved, case.requests, case.file))


def table(cases: list[Case]) -> str:
    """The cases as a table in Markdown."""
    lines = [
        "| tokens not read again | requests × shared tokens | host, device | ms per token, "
        "host's own | ours | ours ÷ host's | data |",
        "| ---: | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for case in cases:
        lines.append(
            f"| {case.saved:,} | {case.requests:,} × {case.shared:,} "
            f"| {case.host}, {case.device} | {case.theirs:.2f} | {case.ours:.2f} "
            f"| {case.ratio:.2f} | [{case.file}](results/{case.file}.json) |"
        )
    return "\n".join(lines)


def draw(cases: list[Case], path: Path) -> Path:
    """Plot our time divided by the host's over the tokens not read again, a point for each case."""
    from matplotlib.figure import Figure

    with plot_style.style():
        figure = Figure(figsize=(6.6, 3.6), layout="constrained")
        axes = figure.subplots()
        looks = zip(dict.fromkeys((case.host, case.device) for case in cases), "os^D", strict=False)
        for (host, device), marker in looks:
            own = [case for case in cases if (case.host, case.device) == (host, device)]
            axes.scatter([case.saved for case in own], [case.ratio for case in own], s=34,
                         marker=marker, label=f"{host}, {device}", alpha=0.85)  # fmt: skip
        axes.axhline(1.0, color="#64748b", linewidth=0.8)
        axes.set_xscale("symlog", linthresh=1e5)
        axes.set_xlim(left=-1e4)
        axes.set_ylim(0, 1.1)
        axes.set_xlabel("prefix tokens that a decode step does not read again")
        axes.set_ylabel("time per token, ours ÷ host's own")
        axes.legend(frameon=False, loc="lower left")
        return plot_style.save(figure, path)


def _cases(path: Path) -> Iterator[Case]:
    host, theirs, ours = FILES[path.stem]
    content = json.loads(path.read_text())
    device = "H200" if "H200" in content["header"]["device"] else "H100"
    pairs: dict[tuple[int, int], dict[str, Any]] = {}
    for row in content["rows"]:
        if row["workload"] in ("few-shot", "unshared") and not row["error"]:
            key = (row["branches"], row["prefix"])
            pairs.setdefault(key, {})[row["backend"]] = row["tpot_ms"]
    for (requests, shared), times in pairs.items():
        if theirs in times and ours in times:
            yield Case(host, device, path.stem, requests, shared, times[theirs], times[ours])
