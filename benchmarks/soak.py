"""A soak: slices of mixed traffic, each with its check, added up in one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.e2e.backend_runs import record
from benchmarks.e2e.choice import Choice, ModelChoice, Output, ServerChoice, TrafficChoice
from benchmarks.e2e.prepare_run import prepared
from benchmarks.e2e.serving_rows import read_rows
from benchmarks.row_files import RowsError, make_folder, write_rows
from deft_backend.files.json_fields import read_json
from deft_backend.files.provenance import provenance

LEVEL_MIB = 64.0
LEVEL_SHARE = 0.03
"""Memory is level if it grows by less than this after the first fifth: MiB, or share of it."""

ROWS = "rows.json"
"""File of a slice's rows, in the slice's folder."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Soak:
    """A soak of one host.

    Attributes
    ----------
    out : Path
        The file of slices.
    seconds : float
        Seconds of traffic in all.
    slice_seconds : float
        Of one server's life.
    servers : ServerChoice
    model : ModelChoice
    command : str
        For the record.
    """

    out: Path
    seconds: float
    slice_seconds: float
    servers: ServerChoice
    model: ModelChoice
    command: str

    @property
    def folder(self) -> Path:
        """The folder of the slices' rows and logs."""
        return self.out.with_suffix("")


def run(soak: Soak, say: Callable[[str], None]) -> dict[str, Any]:
    """Run slices until the file holds all seconds; returns the totals.

    A slice whose check was interrupted keeps its traffic, and the next run checks it.

    Raises
    ------
    RowsError
        If the file cannot be written, or holds something else.
    """
    make_folder(soak.out)
    slices, runs = _before(soak.out)
    if not soak.out.exists():
        for rows in soak.folder.glob(f"part-*/{ROWS}"):  # of another soak
            rows.unlink()
        write_rows(soak.out, slices, {"runs": runs, "total": totals(slices)})
    while (left := soak.seconds - sum(row["seconds"] for row in slices)) > 1.0:
        part = max((row["part"] for row in slices), default=0) + 1
        seconds = min(left, soak.slice_seconds)
        say(f"slice {part}: {seconds:.0f} s of traffic; {left:.0f} s are left")
        found = _slice(soak, part, seconds, say)
        slices.append(found)
        header = {**provenance(), "command": soak.command, "part": part}
        runs.append(header)
        write_rows(soak.out, slices, {"runs": runs, "total": totals(slices)})
        say(f"slice {part}: {found}")
        if found["seconds"] <= 0:  # the server never came up: do not try for ever
            break
    return totals(slices)


def _before(path: Path) -> tuple[list[Row], list[dict[str, Any]]]:
    if not path.exists():
        return [], []
    content = read_json(path, RowsError, "the soak ")
    try:
        return list(content["rows"]), list(content["header"]["runs"])
    except (KeyError, TypeError) as error:
        raise RowsError(f"{path} holds no soak: {error!r}") from error


def _slice(soak: Soak, part: int, seconds: float, say: Callable[[str], None]) -> Row:
    """Traffic on a server with the plugin, then its check on the host's own backend."""
    # A file of its own: a later slice may be of another commit.
    folder = soak.folder / f"part-{part}"
    reference = soak.servers.reference
    choice = Choice(
        Output(folder / ROWS, soak.command), ["traffic"],
        soak.servers, soak.model,
        traffic=TrafficChoice(seconds / 60, part),
    )  # fmt: skip
    with prepared(choice) as setup:
        checks, ours = reference or setup.reference, setup.launch.host.ours
        backends: tuple[str, ...] = (ours, checks)
        if _traffic(folder / ROWS, part, ours) is not None:
            say(f"slice {part}: its traffic is done; only the check is left")
            backends = (checks,)
        record(replace(setup, backends=backends), say)
    return summary(_traffic(folder / ROWS, part, ours, failed=True), part)


def _traffic(path: Path, part: int, backend: str, *, failed: bool = False) -> Any:
    """The row of a slice's traffic, or None; with `failed`, also a row with an error."""
    rows = read_rows(path)[0] if path.is_file() else []
    mine = (row for row in rows if row["workload"] == f"mixed-traffic part {part}")
    mine = (row for row in mine if row["backend"] == backend and (failed or not row["error"]))
    return next(mine, None)


def summary(row: Any, part: int) -> Row:
    """What a slice came to, from its row of mixed traffic."""
    detail = row["detail"]
    traffic, checked = detail.get("traffic", {}), detail.get("checked", {})
    return {
        "part": part, "host": row["host"], "model": row["model"], "error": row["error"],
        "seconds": traffic.get("seconds", 0.0), "finished": traffic.get("finished", 0),
        "aborted": traffic.get("aborted", 0), "failures": traffic.get("failures", 0),
        "evicted": traffic.get("evicted"), "checked_tokens": checked.get("tokens", 0),
        "checked_answers": checked.get("answers", 0), "ties": checked.get("ties", 0),
        "wrong": checked.get("wrong", 0), "log_trouble": detail.get("log_trouble", 0),
        "memory": {
            name: level(detail.get("memory", []), name) for name in ("rss_mib", "gpu_mib")
        },
    }  # fmt: skip


def level(samples: Sequence[dict[str, Any]], name: str) -> dict[str, float] | None:
    """Memory in the second fifth of the time and in the last, in MiB; None if unknown.

    The server's own memory is the largest of a fifth. The GPUs' memory is the smallest, because its
    samples count other processes too, and these only add to it.
    """
    known = [sample for sample in samples if sample.get(name) is not None]
    if len(known) < 2:
        return None
    fifth = known[-1]["s"] / 5
    choose = min if name == "gpu_mib" else max
    rest = [sample for sample in known if sample["s"] >= fifth]
    second = [sample[name] for sample in rest if sample["s"] < 2 * fifth] or [rest[0][name]]
    last = [sample[name] for sample in rest if sample["s"] >= 4 * fifth]
    begin, end = choose(second), choose(last)
    return {"after_first_fifth": begin, "end": end, "growth": round(end - begin, 1)}


def is_level(memory: dict[str, float] | None) -> bool:
    """Whether memory stayed where it was after the first fifth."""
    if memory is None:
        return True
    return memory["growth"] <= max(LEVEL_MIB, LEVEL_SHARE * memory["after_first_fifth"])


def totals(slices: Sequence[Row]) -> dict[str, Any]:
    """Sums over slices, and whether all is well."""
    names = (
        "finished", "aborted", "failures", "checked_answers", "checked_tokens", "ties", "wrong",
        "log_trouble",
    )  # fmt: skip
    sums: dict[str, Any] = {name: sum(row[name] for row in slices) for name in names}
    sums["seconds"] = round(sum(row["seconds"] for row in slices), 1)
    sums["level"] = all(is_level(found) for row in slices for found in row["memory"].values())
    sums["ok"] = bool(
        slices
        and sums["level"]
        and sums["checked_tokens"] > 0
        and not (sums["failures"] or sums["wrong"] or sums["log_trouble"])
        and not any(row["error"] for row in slices)
    )
    return sums
