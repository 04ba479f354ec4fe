"""The figures of an engine in words, for `deft top` and `deft inspect`, and the panels of the
first: one for each engine, at any width from 80 columns on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deft_backend.forest import PrefixForest
from deft_backend.telemetry.counters import DECODE, KINDS, MIXED, VERIFICATION, Counters
from deft_backend.telemetry.decode_log import counted, reasons, size, time_of_a_plan
from deft_backend.tools.watch.engines import (
    DECODING,
    ENDED,
    IDLE,
    SILENT,
    UNREADABLE,
    Engine,
    Row,
    Stretch,
)

REASONS = 3  # reasons of steps on the host's kernel that a line shows

_HOSTS = {"sglang": "SGLang", "vllm": "vLLM"}

_KIND_WORDS = {DECODE: "pure decode", MIXED: "mixed with prefills", VERIFICATION: "verifications"}

STRONG, GOOD, NOW, DIM, WARN, PLAIN = "strong", "good", "now", "dim", "warn", ""
"""What a part of a line is; each view has its own colours for them."""

Part = tuple[str, str]  # a text, and one of the names above


class Line(NamedTuple):
    name: str
    parts: tuple[Part, ...]


class SharedPrefix(NamedTuple):
    """A node that several requests attend to; `saved` counts the tokens that are not read again."""

    node: int
    start: int
    tokens: int
    readers: int

    @property
    def saved(self) -> int:
        return self.tokens * (self.readers - 1)


def shared_prefixes(forest: PrefixForest) -> list[SharedPrefix]:
    columns = (forest.start, forest.length, forest.num_queries)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    prefixes = [SharedPrefix(node, *row) for node, row in enumerate(rows)]
    return sorted((p for p in prefixes if p.readers > 1 and p.tokens), key=lambda p: -p.saved)


def title(engine: Engine) -> str:
    reading = engine.reading
    if reading is None:
        return ""
    name = f"{_HOSTS.get(reading.host, reading.host)} {reading.host_version}"
    policy = f"{reading.backend}, policy {reading.policy}"
    if reading.short_tokens:
        policy = f"{policy}, short chunks up to {reading.short_tokens} tokens"
    parts = [name, policy, reading.device]
    if engine.processes > 1:
        parts.append(counted(engine.processes, "process", "processes"))
    return " · ".join(parts)


def status(engine: Engine) -> str:
    if engine.status == IDLE:
        return f"idle for {lasting(engine.since)}"
    if engine.status == ENDED:
        return f"ended {lasting(engine.since)} ago"
    return engine.status


def lines(row: Row) -> Iterator[Line]:
    engine, counters = row.engine, row.engine.counters
    if engine.status == SILENT and engine.reading is not None:
        said = f"process {engine.reading.pid} hangs, is stopped, or is another program"
        yield Line("silent", ((f"no sign of life for {lasting(engine.since)}: {said}", WARN),))
    yield Line("steps", _steps(counters, row.now))
    if any(counters.total(kind).steps for kind in KINDS if kind != DECODE):
        yield Line("of these", ((_kinds(counters), PLAIN),))
    if counters.steps_host:
        yield Line("by the host", ((reasons(counters.steps_host, REASONS), PLAIN),))
    yield Line("KV read", _reads(counters, row.now))
    yield Line("batch", (_batch(row.batch),))
    if each := time_of_a_plan(counters):
        yield Line("planning", ((f"{counted(counters.plans, 'plan')}, {each} each", PLAIN),))
    if counters.compile_seconds >= 0.1:
        said = f"{counters.compile_seconds:,.1f} s since the start"
        yield Line("compiling", ((said, PLAIN),))
    if counters.verified_tokens:  # only servers that speculate
        yield Line("verified", ((counted(counters.verified_tokens, "query token"), PLAIN),))


def _steps(counters: Counters, now: Stretch | None) -> tuple[Part, ...]:
    every, tree = counters.decode_steps, counters.steps_tree
    if not every:
        return (("no request has been decoded yet", PLAIN),)
    said = f" of {every:,} through tree attention ({percent(tree / every)})"
    parts = [(f"{tree:,}", STRONG), (said, PLAIN)]
    if now is not None and now.counters.decode_steps:
        parts.append((f" · now {now.steps_a_second:,.1f} steps/s", NOW))
    return tuple(parts)


def _kinds(counters: Counters) -> str:
    parts = []
    for kind in KINDS:
        every, tree = counters.total(kind).steps, counters.total(kind, tree=True).steps
        if every:
            parts.append(f"{tree:,} of {every:,} {_KIND_WORDS[kind]}")
    if counters.tree_share is not None:
        parts.append(f"{percent(counters.tree_share)} of the decoding, by KV bytes of contexts")
    return " · ".join(parts)


def _reads(counters: Counters, now: Stretch | None) -> tuple[Part, ...]:
    saved = counters.saved
    read, guided = counters.kv_bytes_read, counters.kv_bytes_query_guided
    if saved is None:
        said = f"{size(read)} of contexts that hold {size(guided)}" if read else "nothing yet"
        return ((said, PLAIN),)
    style = GOOD if saved >= 0.005 else PLAIN
    parts = [
        (f"{size(read)} instead of {size(guided)} · ", PLAIN),
        (f"{percent(saved)} saved", style),
    ]
    if now is not None and now.counters.saved is not None:
        parts.append((f" · now {percent(now.counters.saved)}", NOW))
    return tuple(parts)


def _batch(forest: PrefixForest | str) -> Part:
    if isinstance(forest, str):
        return forest, DIM
    said = (
        f"{counted(forest.batch_size, 'request')} · share {forest.share:,.1f}: "
        f"{forest.tokens_attended:,} tokens attended to, {forest.tokens_stored:,} stored"
    )
    return said, PLAIN


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


PREFIXES = 3  # shared prefixes shown for each engine

_COLOURS = {DECODING: "green", IDLE: "cyan", SILENT: "yellow", ENDED: "dim", UNREADABLE: "red"}
_STYLES = {
    STRONG: "bold",
    GOOD: "bold green",
    NOW: "green",
    DIM: "dim",
    WARN: "yellow",
    PLAIN: "default",
}


def view(
    rows: Sequence[Row], folder: str, *, live: bool, port: int | None = None
) -> RenderableType:
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
            parts.append(Text(f"{row.engine.name}: {status(row.engine)}", style="dim"))
    return Group(*parts)


def _panel(row: Row) -> Panel:
    engine = row.engine
    heading = Text(engine.name, style="bold")
    heading.append(f" {status(engine)}", style=_COLOURS[engine.status])
    if engine.reading is None:
        return Panel(Text(engine.problem), title=heading, title_align="left", box=box.ROUNDED)
    heading.append(f" · {title(engine)}", style="not bold default")
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for line in lines(row):
        text = Text()
        for words, style in line.parts:
            text.append(words, style=_STYLES[style])
        table.add_row(line.name, text)
    content = Group(table, *_prefixes(row))
    return Panel(content, title=heading, title_align="left", box=box.ROUNDED, padding=(0, 1))


def _prefixes(row: Row) -> list[RenderableType]:
    prefixes = [] if isinstance(row.batch, str) else shared_prefixes(row.batch)
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
