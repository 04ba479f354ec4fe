"""The A/B report: one self-contained HTML page, and the JSON with all of its figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from deft_backend.files.private_files import write_private
from deft_backend.tools.ab.comparison import AbResult, Compared
from deft_backend.tools.ab.report_plots import kv_plot, tpot_plot, ttft_plot
from deft_backend.tools.ab.units import MISSING, megabytes, milliseconds, percent

CPU_TIMES = (
    "Times on this machine mean nothing: there is no GPU, and the kernels run in Triton's "
    "interpreter."
)
KV_MEANING = (
    "The KV figures are exact: bytes that the decode attention reads from the KV cache, counted "
    "from the plans that ran. The same plan reads the same on a GPU, where it is what a decode "
    "step waits for. (The policy auto plans for its device: a GPU may treat very small batches "
    "otherwise.)"
)


def write_report(result: AbResult, folder: Path, own_command: str) -> tuple[Path, Path]:
    """Write ``report.html`` and ``results.json`` into `folder`.

    Parameters
    ----------
    result : AbResult
        The comparison.
    folder : Path
        The folder; the function creates it if it does not exist.
    own_command : str
        The ``deft ab …`` command of the run.

    Returns
    -------
    (Path, Path)
        The page and the JSON.
    """
    page, data = folder / "report.html", folder / "results.json"
    content = {**result.to_json(), "command": own_command}
    write_private(data, json.dumps(content, indent=2) + "\n")
    write_private(page, _page(result, own_command))
    return page, data


def _page(result: AbResult, own_command: str) -> str:
    commands = [own_command, *(f"# {side}\n{line}" for side, line in result.commands.items())]
    note = f"<div class='note'><p><b>{CPU_TIMES}</b></p><p>{KV_MEANING}</p></div>"
    return fill_page(
        "report.html",
        model=escape(result.model),
        device=escape(str(result.provenance["device"])),
        date=escape(str(result.provenance["date"])),
        cards="".join(_cards(result)),
        cpu_note="" if result.on_gpu else note,
        times_class="" if result.on_gpu else "grey",
        times_caption="" if result.on_gpu else "Not meaningful without a GPU",
        rows=table_rows(_headline(w) for w in result.workloads),
        kv_plot=kv_plot(result),
        tpot_plot=tpot_plot(result),
        ttft_plot=ttft_plot(result),
        agreement=table_rows(_agreement(w) for w in result.workloads),
        divergences=_divergences(result),
        steps=table_rows(_steps(w) for w in result.workloads),
        workloads=table_rows([w.workload, w.description] for w in result.workloads),
        environment=table_rows(_environment(result)),
        commands=escape("\n\n".join(commands)),
    )


def fill_page(name: str, **parts: str) -> str:
    """A page of this folder with its parts filled in."""
    folder = resources.files("deft_backend.tools.ab")
    style = folder.joinpath("report_style.html").read_text(encoding="utf-8")
    page = folder.joinpath(name).read_text(encoding="utf-8")
    return Template(page).substitute(parts, style=style)


def _cards(result: AbResult) -> Iterable[str]:
    answers = sum(w.agreement.answers for w in result.workloads)
    alike = sum(w.agreement.equal for w in result.workloads)
    kind = "good" if result.same else "bad"
    yield f"<div class='card {kind}'><b>{alike} of {answers}</b>answers have the same tokens</div>"
    saved = [
        (w.kv_read.saved, w.workload)
        for w in result.workloads
        if w.kv_read is not None and w.kv_read.saved is not None
    ]
    if saved:
        best, name = max(saved)
        yield (
            f"<div class='card good'><b>{percent(best)}</b>less KV read per decode step "
            f"({escape(name)}, the most)</div>"
        )
    steps = [w.deft.counters for w in result.workloads if w.deft.counters]
    tree, every = sum(c.steps_tree for c in steps), sum(c.decode_steps for c in steps)
    yield f"<div class='card'><b>{tree} of {every}</b>decode steps through tree attention</div>"


def _headline(w: Compared) -> list[str]:
    read = w.kv_read
    return [
        w.workload,
        megabytes(read.query_by_query if read else None),
        megabytes(read.deft if read else None),
        percent(read.saved if read else None),
        milliseconds(w.host.tpot),
        milliseconds(w.deft.tpot),
        milliseconds(w.host.ttft),
        milliseconds(w.deft.ttft),
        f"{w.host.tokens_a_second:,.1f}",
        f"{w.deft.tokens_a_second:,.1f}",
        f"{w.agreement.equal} of {w.agreement.answers}",
    ]


def _agreement(w: Compared) -> list[str]:
    a = w.agreement
    numbers = (a.answers, a.equal, a.not_compared, a.tokens)
    return [w.workload, *(f"{n:,}" for n in numbers), f"{a.largest_gap:.2g}"]


def _divergences(result: AbResult) -> str:
    rows = [
        [
            w.workload,
            d.answer,
            str(d.position),
            f"{d.host_token!r} ({d.host_logprob:.3f})",
            f"{d.deft_token!r} ({d.deft_logprob:.3f})",
            f"{d.gap:.2g}",
            f"{d.margin:.2g}",
        ]
        for w in result.workloads
        for d in w.agreement.divergences
    ]
    if not rows:
        return "<p>No answer differs in any token.</p>"
    names = ("workload", "answer", "tokens before", "host", "deft", "gap", "host's margin")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        "<p>First difference of each answer, with log-probabilities. The margin is how far the "
        "host put its token above its second choice: near 0, rounding decides.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{table_rows(rows)}</tbody></table>"
    )


def _steps(w: Compared) -> list[str]:
    counters = w.deft.counters
    if counters is None:
        return [w.workload, str(w.requests), *[MISSING] * 4]
    reasons = "; ".join(f"{reason}: {n}" for reason, n in counters.steps_host.items())
    numbers = (counters.decode_steps, counters.steps_tree)
    return [w.workload, str(w.requests), *map(str, numbers), reasons or "0", str(counters.plans)]


def _environment(result: AbResult) -> list[list[str]]:
    rows = [["device", str(result.provenance["device"])]]
    rows += [[f"{side} backend", name] for side, name in result.backends.items()]
    for side, length in (result.acceptance_length or {}).items():
        rows.append([f"{side} acceptance length", MISSING if length is None else f"{length:.2f}"])
    rows += [["policy", result.policy], ["python", str(result.provenance["python"])]]
    versions = result.provenance["versions"]
    if isinstance(versions, dict):
        rows += [[name, str(version)] for name, version in versions.items()]
    if result.provenance.get("commit"):
        rows.append(["commit", str(result.provenance["commit"])])
    return rows


def table_rows(rows: Iterable[Sequence[str]]) -> str:
    """The rows of a table; every cell is escaped."""
    return "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
