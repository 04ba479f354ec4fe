"""Write `docs/cli.md` from the commands' own help: ``python -m tools.cli_page``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from deft_backend.cli.app import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"

_HEAD = """# The `deft` command

`python -m tools.cli_page` writes this page from `deft COMMAND --help`.

A command passes everything behind `--` to the host unchanged. `python -m deft_backend …` is the
same command, and also runs from a checkout that is not installed. Exit code 2 means that the
command could not start its work: the message gives the reason and a remedy. Ctrl-C, SIGTERM and a
lost terminal first end what the command started; the exit code is then 130, 143 or 129. Ctrl-C is
the usual end of `deft top` and `deft inspect`: 0.
"""


def page() -> str:
    """The page, as the present commands describe themselves."""
    group: Any = typer.main.get_command(app)
    return "\n".join([_HEAD, *(_section(name, group.commands[name]) for name in group.commands)])


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
    table = ["| option | meaning |\n| --- | --- |", *rows]
    parts = [f"## `deft {name}`\n", f"`deft {name} {usage}`\n", f"{command.help}\n"]
    return "\n".join([*parts, *table, ""])


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name}`"
    meaning = (parameter.help or "").replace("|", "\\|")
    default = parameter.default
    if isinstance(default, int | float) and not isinstance(default, bool):
        meaning += f" Default: {default:g}."
    return f"| {names} | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
