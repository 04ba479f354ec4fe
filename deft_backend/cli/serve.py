"""`deft serve`: start the host server with the plugin, in the foreground."""

import os
from typing import Annotated

import typer
from typer import Argument, Option

from deft_backend.cli.errors import checked_settings, fail, host_arguments, reported, say, stderr
from deft_backend.cli.models import ModelFilesError, ModelOption, served_model

HostOption = Annotated[
    str | None, Option("--host", help="sglang or vllm; default: whichever is installed.")
]


def chosen_host(host: str | None, *, needed: bool = True, compared: bool = False) -> str:
    """The host that the user named, or the installed one; fails in one line if there is none."""
    from deft_backend.hosts.windows import TESTED
    from deft_backend.tools.servers.command import HOSTS, installed_hosts

    if host is not None and host not in HOSTS:
        raise fail(f"there is no host {host!r}; expected one of {', '.join(HOSTS)}")
    installed = installed_hosts()
    if host is None:
        host = installed[0] if installed else HOSTS[0]
    if needed and host not in installed:
        apart = f", in an environment without {TESTED[installed[0]].name}" if installed else ""
        install = f"run{apart}: pip install 'deft-backend[{host}]'"
        raise fail(f"{TESTED[host].name} is not installed; {install}")
    reason = TESTED[host].refuse() if compared else None
    if reason is not None:
        raise fail(f"{TESTED[host].name} decodes without tree attention: {reason}")
    return host


def serve(
    host_args: Annotated[
        list[str] | None,
        Argument(metavar="-- HOST OPTIONS", help="The host server gets them unchanged."),
    ] = None,
    model: ModelOption = None,
    host: HostOption = None,
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 30000,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the command; start nothing.")] = False,
) -> None:
    """Start SGLang or vLLM with tree attention, on a GPU if there is one, else on the CPU."""
    from deft_backend.tools.servers.command import StartError, check_port, server_command
    from deft_backend.tools.servers.driver_stub import DriverStubError

    extra = host_arguments(host_args)
    checked_settings()
    served = served_model(model, extra)
    host = chosen_host(host, needed=not dry_run)
    if not dry_run:
        with reported(ModelFilesError, StartError):
            served.check()
            check_port(extra, port)
    with reported(DriverStubError, StartError):
        command = server_command(served.name, port, host=host, host_arguments=extra)
    if dry_run:
        typer.echo(command.shell())
        return
    for note in command.notes:
        say(stderr, f"• {note}", "yellow")
    say(stderr, command.shell(), "dim")
    # Replace this process by the server, which then gets all signals and sets the exit code.
    os.execvpe(command.arguments[0], command.arguments, command.full_environment())
