"""What `deft top` shows: one panel for each engine, at any width from 80 columns on."""

import time
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deft_backend.telemetry.decode_log import counted
from deft_backend.tools.watch import figures
from deft_backend.tools.watch.engines import DECODING, ENDED, IDLE, SILENT, UNREADABLE, Row

PREFIXES = 3  # shared prefixes shown for each engine

_COLOURS = {DECODING: "green", IDLE: "cyan", SILENT: "yellow", ENDED: "dim", UNREADABLE: "red"}
_STYLES = {
    figures.STRONG: "bold",
    figures.GOOD: "bold green",
    figures.NOW: "green",
    figures.DIM: "dim",
    figures.WARN: "yellow",
    figures.PLAIN: "default",
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
            parts.append(Text(f"{row.engine.name}: {figures.status(row.engine)}", style="dim"))
    return Group(*parts)


def _panel(row: Row) -> Panel:
    engine = row.engine
    title = Text(engine.name, style="bold")
    title.append(f" {figures.status(engine)}", style=_COLOURS[engine.status])
    if engine.reading is None:
        return Panel(Text(engine.problem), title=title, title_align="left", box=box.ROUNDED)
    title.append(f" · {figures.title(engine)}", style="not bold default")
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for line in figures.lines(row):
        text = Text()
        for words, style in line.parts:
            text.append(words, style=_STYLES[style])
        table.add_row(line.name, text)
    content = Group(table, *_prefixes(row))
    return Panel(content, title=title, title_align="left", box=box.ROUNDED, padding=(0, 1))


def _prefixes(row: Row) -> list[RenderableType]:
    prefixes = figures.shared_prefixes(row.batch.forest)
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
