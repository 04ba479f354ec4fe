"""The commands, one module each."""

import errno
import signal
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from deft_backend.cli.ab import ab
from deft_backend.cli.doctor import doctor
from deft_backend.cli.errors import fail, help_of, stderr
from deft_backend.cli.explain import explain
from deft_backend.cli.serve import serve
from deft_backend.cli.tune import tune
from deft_backend.cli.views import inspect, top
from deft_backend.cli.warm import warm
from deft_backend.settings.version import VERSION

_START_HOSTS = ("serve", "ab")


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # from here on, Ctrl-C unwinds
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            stderr.print("\ninterrupted")
            raise typer.Exit(128 + signal.SIGINT) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise fail("cannot write the output: no space is left on the device") from None
        except ImportError as error:
            raise fail(f"{error}; run 'deft doctor' for what is missing") from None
        except Exception as error:
            # By name: Typer raises click's class, or that of its own copy of click.
            if type(error).__name__ == "NoSuchOption" and ctx.invoked_subcommand in _START_HOSTS:
                unknown: Any = error
                unknown.message += (
                    " (the plugin is selected already; omit it)"
                    if str(unknown.option_name).endswith("attention-backend")
                    else " (options of the host server go behind '--')"
                )
            raise


app = typer.Typer(
    cls=_Commands,
    help="Tree attention for LLM servers: a decode step reads shared KV cache once.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deft-backend {VERSION}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Tree attention for LLM servers: a decode step reads shared KV cache once."""


for command in (serve, ab, doctor, explain, top, inspect, tune, warm):
    app.command(help=help_of(command))(command)
