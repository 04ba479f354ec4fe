"""`deft top` and `deft inspect`: what servers on this machine do, in the terminal or on a page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from deft_backend.cli.errors import ended_by_signals, fail, reported, say, state_folder

if TYPE_CHECKING:
    from deft_backend.tools.watch.engines import Follower, Row

RECENT = 3600.0  # seconds for which an ended server stays in the view

_LOOK_SECONDS = 1.0  # between two looks
_ASK_SECONDS = 5.0  # between two questions for the batch of a server with the device planner
_FIRST_ANSWER = 3.0


def top(
    port: Annotated[
        int | None, Argument(metavar="PORT", min=1, max=65535, help="Only the server on this port.")
    ] = None,
    once: Annotated[bool, Option("--once", help="Print once and end, for scripts.")] = False,
) -> None:
    """Show what every server on this machine decodes, reads and saves.

    Outside a terminal, every look is printed below the one before. With --once, the exit code is 1
    if no server runs.
    """
    from rich.live import Live

    from deft_backend.telemetry.state_reader import StateError
    from deft_backend.tools.watch.figures import view

    folder = state_folder()
    known: dict[Path, Follower] = {}
    console = Console()
    try:
        with ended_by_signals(), reported(StateError):
            if once:
                rows = _rows(folder, port, known, wait=_FIRST_ANSWER)
                console.print(view(rows, str(folder), live=False, port=port))
                raise typer.Exit(0 if any(row.engine.runs for row in rows) else 1)
            with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
                while True:
                    rows = _rows(folder, port, known)
                    shown = view(rows, str(folder), live=True, port=port)
                    if console.is_terminal:
                        live.update(shown, refresh=True)
                    else:
                        console.print(shown)
                    time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        pass
    finally:
        for follower in known.values():
            follower.close()


def inspect(
    server: Annotated[int | None, Option(help="The server's port; default: the only one.")] = None,
    port: Annotated[int, Option(min=0, max=65535, help="The page's port; 0: a free one.")] = 8765,
) -> None:
    """Show on a page which requests share what, live. It only reads, and shows no text."""
    from deft_backend.telemetry.state_reader import StateError, server_file
    from deft_backend.tools.watch.page_server import Inspector, PageServer

    folder = state_folder()
    with reported(StateError):
        server = int(server_file(folder, server).name.split("-")[0])
    inspector = Inspector(folder, server)
    try:
        page = PageServer(port, inspector.state)
    except OSError as error:
        raise fail(
            f"cannot listen on port {port}: {error}; choose another --port, or 0 for a free one"
        ) from None
    console = Console()
    say(console, f"the forest of the server on port {server}: {page.url}")
    say(console, "Ctrl-C ends the page; the server goes on")
    try:
        with ended_by_signals():
            page.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        inspector.close()
        page.server_close()


def _rows(
    folder: Path, port: int | None, known: dict[Path, Follower], wait: float = 0.0
) -> list[Row]:
    """All running engines, and those that ended recently; `known` is kept between two looks."""
    from deft_backend.tools.watch.engines import ENDED, Follower, find_engines

    rows = []
    for engine in find_engines(folder, port):
        if engine.status == ENDED and engine.since > RECENT:
            continue
        follower = known.setdefault(engine.path, Follower(_ASK_SECONDS))
        rows.append(follower.look(engine, wait))
    return rows
