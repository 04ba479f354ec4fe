"""Shows the progress of an A/B run: a line for each server's start, a bar for each workload."""

from __future__ import annotations

from collections.abc import Callable

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

from deft_backend.tools.harness.workload import Workload
from deft_backend.tools.servers.command import ServerCommand

_TITLES = {"host": "host's own backend", "deft": "tree attention"}


class Progress(bars.Progress):
    """A line for each server's start, a bar for each workload; a context manager."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            bars.SpinnerColumn(finished_text="[green]✓[/green]"),
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=28),
            bars.MofNCompleteColumn(),
            bars.TextColumn("[dim]{task.fields[unit]}[/dim]"),
            bars.TimeElapsedColumn(),
            console=console,
        )
        self._noted: set[str] = set()

    def starting(self, side: str, command: ServerCommand) -> Callable[[], None]:
        """A server starts; the caller calls the returned function when it answers."""
        for note in command.notes:
            if note not in self._noted:
                self._noted.add(note)
                self.print(f"[dim]• {note}[/dim]", highlight=False)
        self.print(f"[bold]{side}[/bold]: {_TITLES[side]}", highlight=False)
        task = self.add_task(_label("starting the server"), total=None, unit="")
        return lambda: self.update(task, total=1, completed=1)

    def announce(self, line: str) -> None:
        """A line before the bars of a server that runs already."""
        self.print(f"[bold]{escape(line)}[/bold]", highlight=False)

    def replaying(self, workload: Workload) -> Callable[[int], None]:
        """A workload begins; the caller passes numbers of new tokens to the returned function."""
        task = self.add_task(_label(workload.name), total=workload.tokens, unit="tokens")
        return lambda count: self.advance(task, count)


def _label(text: str) -> str:
    return text.ljust(20)
