"""Shows the progress of an A/B run: a line for each server's start, a bar for each workload."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from deft_backend.tools.harness.workload import Workload
from deft_backend.tools.servers.command import ServerCommand

_TITLES = {"host": "host's own backend", "deft": "tree attention"}


class ProgressWatcher:
    """Shows the progress of both servers; a context manager."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓[/green]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[unit]}[/dim]"),
            TimeElapsedColumn(),
            console=console,
        )
        self._start: TaskID | None = None
        self._noted: set[str] = set()

    def __enter__(self) -> ProgressWatcher:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def starting(self, side: str, command: ServerCommand) -> Callable[[float], None]:
        """See :class:`deft_backend.tools.ab.sides.StartWatcher`."""
        for note in command.notes:
            if note not in self._noted:
                self._noted.add(note)
                self._bars.print(f"[dim]• {note}[/dim]", highlight=False)
        self._bars.print(f"[bold]{side}[/bold]: {_TITLES[side]}", highlight=False)
        task = self._bars.add_task(self._label("starting the server"), total=None, unit="")
        self._start = task
        return lambda seconds: self._bars.refresh()

    def started(self, side: str) -> None:
        """See :class:`deft_backend.tools.ab.sides.StartWatcher`."""
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
        """See :class:`deft_backend.tools.ab.run.Progress`."""
        label, tokens = self._label(workload.name), workload.tokens
        task = self._bars.add_task(label, total=tokens, unit="tokens")
        return lambda count: self._bars.advance(task, count)

    def _label(self, text: str) -> str:
        return text.ljust(20)
