"""Shows the progress of an A/B run: a line for each server's start, a bar for each workload."""

from __future__ import annotations

from collections.abc import Callable

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

from deft_backend.tools.harness.workload import Workload
from deft_backend.tools.servers.command import ServerCommand

_TITLES = {"host": "host's own backend", "deft": "tree attention"}


class Progress:
    """A line for each server's start, a bar for each workload; a context manager."""

    def __init__(self, console: Console) -> None:
        self._bars = bars.Progress(
            bars.SpinnerColumn(finished_text="[green]✓[/green]"),
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=28),
            bars.MofNCompleteColumn(),
            bars.TextColumn("[dim]{task.fields[unit]}[/dim]"),
            bars.TimeElapsedColumn(),
            console=console,
        )
        self._start: bars.TaskID | None = None
        self._noted: set[str] = set()

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def starting(self, side: str, command: ServerCommand) -> Callable[[float], None]:
        """A server starts; the caller passes the seconds waited so far to the returned function."""
        for note in command.notes:
            if note not in self._noted:
                self._noted.add(note)
                self._bars.print(f"[dim]• {note}[/dim]", highlight=False)
        self._bars.print(f"[bold]{side}[/bold]: {_TITLES[side]}", highlight=False)
        self._start = self._bars.add_task(_label("starting the server"), total=None, unit="")
        return lambda seconds: self._bars.refresh()

    def started(self, side: str) -> None:
        """The server answers."""
        if self._start is not None:
            self._bars.update(self._start, total=1, completed=1)

    def stop(self) -> None:
        """No more bars; other lines may follow."""
        self._bars.stop()

    def announce(self, line: str) -> None:
        """A line before the bars of a server that runs already."""
        if line:
            self._bars.print(f"[bold]{escape(line)}[/bold]", highlight=False)

    def replaying(self, workload: Workload) -> Callable[[int], None]:
        """A workload begins; the caller passes numbers of new tokens to the returned function."""
        task = self._bars.add_task(_label(workload.name), total=workload.tokens, unit="tokens")
        return lambda count: self._bars.advance(task, count)


def _label(text: str) -> str:
    return text.ljust(20)
