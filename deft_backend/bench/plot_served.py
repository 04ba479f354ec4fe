"""Time per output token of real servers, drawn from what ``served_prefix`` recorded.

``python -m deft_backend.bench.plot_served docs/results/e2e-sglang-h100.json``
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import matplotlib.pyplot as plt
import typer

COLOURS = {"deft": "#c2410c", "fa3": "#64748b", "flashinfer": "#94a3b8", "triton": "#cbd5e1"}


def case_of(row: dict[str, Any]) -> str:
    """The workload in words, over two lines."""
    requests = "request" if row["branches"] == 1 else "requests"
    if row["prefix"]:
        return f"{row['prefix']:,} shared\n× {row['branches']} {requests}"
    return f"nothing shared\n{row['branches']} × {row['suffix']:,}"


def main(
    data: Annotated[Path, typer.Argument(help="JSON that served_prefix wrote.")],
    out: Annotated[Path | None, typer.Option(help="Default: beside the data, .svg.")] = None,
) -> None:
    """Draw grouped bars, a group a workload, a bar a backend."""
    content = json.loads(data.read_text())
    rows = content["rows"]
    cases = list(dict.fromkeys(case_of(row) for row in rows))
    names = list(dict.fromkeys(row["backend"] for row in rows))
    names.sort(key=lambda name: name.startswith("deft"))
    matplotlib.rcParams.update({"font.size": 9, "svg.hashsalt": "deft"})
    figure, axes = plt.subplots(figsize=(9.0, 3.6), layout="constrained")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = {case_of(row): row["tpot_ms"] for row in rows if row["backend"] == name}
        at = [index + (number - (len(names) - 1) / 2) * width for index in range(len(cases))]
        kernel = name.removesuffix("+graphs")
        bars = axes.bar(
            at, [found[case] for case in cases], width * 0.92,
            color=COLOURS.get(kernel, "#a8a29e"), label=f"SGLang, {kernel}",
        )  # fmt: skip
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("ms per output token")
    axes.set_title(
        f"{content['header']['model']}, {content['header']['device'].split(' (')[0]}, CUDA graphs",
        fontsize=9, loc="left",
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(out or data.with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
