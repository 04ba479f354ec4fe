"""What `deft top` shows: one panel for each engine, at any width from 80 columns on."""

import time
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deft_backend.telemetry.counters import Counters
from deft_backend.telemetry.decode_log import counted, size, time_of_a_plan
from deft_backend.tools.watch.batches import Row, ShownBatch, Stretch, shared_prefixes
from deft_backend.tools.watch.engines import DECODING, ENDED, IDLE, SILENT, UNREADABLE

PREFIXES = 3  # shared prefixes shown for each engine

REASONS = 3  # reasons of steps on the host's kernel shown for each engine

_COLOURS = {DECODING: "green", IDLE: "cyan", SILENT: "yellow", ENDED: "dim", UNREADABLE: "red"}
_HOSTS = {"sglang": "SGLang", "vllm": "vLLM"}


def view(
    rows: Sequence[Row], folder: str, *, live: bool, port: int | None = None
) -> RenderableType:
    """All engines that run, and one line for each that has ended."""
    head = Text()
    running = [row for row in rows if row.engine.status != ENDED]
    head.append("deft top", style="bold")
    head.append(f" · {counted(len(running), 'server')} · {time.strftime('%H:%M:%S')}")
    if live:
        head.append(" · Ctrl-C ends", style="dim")
    parts: list[RenderableType] = [head]
    if not running:
        where = "" if port is None else f" on port {port}"
        parts.append(Text(f"No server with the plugin is running{where}, according to {folder}."))
        start = "Start one with: deft serve --model M"
        parts.append(Text(start if port is None else "See all with: deft top", style="dim"))
    parts += [_panel(row) for row in running]
    for row in rows:
        if row.engine.status == ENDED:
            since = lasting(row.engine.since)
            parts.append(Text(f"{row.engine.name}: ended {since} ago", style="dim"))
    return Group(*parts)


def _panel(row: Row) -> Panel:
    engine, reading = row.engine, row.engine.reading
    title = Text(engine.name, style="bold")
    title.append(f" {engine.status}", style=_COLOURS[engine.status])
    if engine.status == IDLE:
        title.append(f" for {lasting(engine.since)}", style=_COLOURS[engine.status])
    if reading is None:
        return Panel(Text(engine.problem), title=title, title_align="left", box=box.ROUNDED)
    host = f"{_HOSTS.get(reading.host, reading.host)} {reading.host_version}"
    title.append(f" · {host} · {reading.backend}, policy {reading.policy} · {reading.device}",
                 style="default")  # fmt: skip
    figures = Table.grid(padding=(0, 2), expand=True)
    figures.add_column(style="dim", no_wrap=True)
    figures.add_column(ratio=1, overflow="fold")
    for name, value in _lines(row):
        figures.add_row(name, value)
    return Panel(
        Group(figures, *_prefixes(row.batch)),
        title=title,
        title_align="left",
        box=box.ROUNDED,
        padding=(0, 1),
    )


def _lines(row: Row) -> Iterable[tuple[str, Text]]:
    engine, counters = row.engine, row.engine.counters
    if engine.status == SILENT and engine.reading is not None:
        since = lasting(time.time() - engine.reading.sign_of_life)
        said = f"process {engine.reading.pid} hangs, is stopped, or is another program"
        yield "silent", Text(f"no sign of life for {since}: {said}", style="yellow")
    yield "steps", _steps(counters, row.now)
    if counters.steps_host:
        yield "by the host", _reasons(counters.steps_host)
    yield "KV read", _reads(counters, row.now)
    yield "batch", _batch(row.batch)
    if each := time_of_a_plan(counters):
        yield "planning", Text(f"{counted(counters.plans, 'plan')}, {each} each")
    if counters.compile_seconds >= 0.1:
        yield "compiling", Text(f"{counters.compile_seconds:,.1f} s since the start")
    if counters.verified_tokens or counters.verified_drafts:  # only servers that speculate
        yield "verified", _verified(counters, row.now)


def _steps(counters: Counters, now: Stretch | None) -> Text:
    every = counters.decode_steps
    if not every:
        return Text("no request has been decoded yet")
    text = Text(f"{counters.steps_tree:,}", style="bold")
    text.append(" of ", style="not bold")
    text.append(f"{every:,} through tree attention", style="not bold")
    text.append(f" ({percent(counters.steps_tree / every)})", style="not bold")
    if now is not None and now.counters.decode_steps:
        text.append(f" · now {now.steps_a_second:,.1f} steps/s", style="not bold green")
    return text


def _reads(counters: Counters, now: Stretch | None) -> Text:
    part = counters.saved
    read, guided = counters.kv_bytes_read, counters.kv_bytes_query_guided
    if part is None:
        return Text(f"{size(read)} of contexts that hold {size(guided)}" if read else "nothing yet")
    text = Text(f"{size(read)} instead of {size(guided)} · ")
    text.append(f"{percent(part)} saved", style="bold green" if part >= 0.005 else "default")
    recent = None if now is None else now.counters.saved
    if recent is not None:
        text.append(f" · now {percent(recent)}", style="green")
    return text


def _verified(counters: Counters, now: Stretch | None) -> Text:
    text = Text(counted(counters.verified_tokens, "query token"))
    if counters.acceptance_length is not None:
        text.append(f" · acceptance length {counters.acceptance_length:.2f}")
    recent = None if now is None else now.counters.acceptance_length
    if recent is not None:
        text.append(f" · now {recent:.2f}", style="green")
    return text


def _reasons(steps: Mapping[str, int]) -> Text:
    ordered = sorted(steps.items(), key=lambda item: -item[1])
    parts = [f"{count:,} × {reason}" for reason, count in ordered[:REASONS]]
    if len(ordered) > REASONS:
        parts.append(f"{sum(n for _, n in ordered[REASONS:]):,} × {len(ordered) - REASONS} others")
    return Text("; ".join(parts))


def _batch(batch: ShownBatch) -> Text:
    forest = batch.forest
    if forest is None:
        return Text(batch.problem, style="dim")
    return Text(
        f"{counted(forest.batch_size, 'request')} · share {forest.share:,.1f}: "
        f"{forest.tokens_attended:,} tokens attended to, {forest.tokens_stored:,} stored"
    )


def _prefixes(batch: ShownBatch) -> list[RenderableType]:
    """A table of the shared prefixes that save most, if there are any."""
    prefixes = [] if batch.forest is None else shared_prefixes(batch.forest)
    if not prefixes:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("shared tokens", justify="right")
    table.add_column("at", justify="left")
    table.add_column("requests", justify="right")
    table.add_column("tokens not read again", justify="right")
    for p in prefixes[:PREFIXES]:
        place = f"{p.start:,}–{p.start + p.tokens:,}"
        table.add_row(f"{p.tokens:,}", place, f"{p.readers:,}", f"{p.saved:,}")
    if len(prefixes) > PREFIXES:
        table.add_row("", Text(f"… {len(prefixes) - PREFIXES:,} more", style="dim"), "", "")
    return [table]


def lasting(seconds: float) -> str:
    """A time in one unit.

    >>> lasting(3), lasting(200), lasting(9000), lasting(400000)
    ('3 s', '3 min', '2 h', '5 days')
    """
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"
