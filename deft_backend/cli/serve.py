"""`deft serve`: the host server with the plugin, in the foreground."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Annotated

import typer

from deft_backend.cli.errors import fail, host_arguments, reported, stderr
from deft_backend.cli.models import chosen_model
from deft_backend.policies import POLICY_NAMES, PolicyError, get_policy

HOST_HINT = "SGLang is not installed; run: pip install 'deft-backend[sglang]'"


def serve(
    host_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- HOST OPTIONS]", help="Passed on to the host server."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder or name; default: models/tiny-llama of the checkout."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 30000,
    policy: Annotated[
        str | None, typer.Option(help=f"How KV is grouped: {', '.join(POLICY_NAMES)}.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command and do not run it.")
    ] = False,
) -> None:
    """Run SGLang with tree attention: on the GPU if there is one, else on its CPU engine."""
    from deft_backend.hosts.driver_stub import DriverStubError
    from deft_backend.hosts.launch import server_command

    extra = host_arguments(host_args)
    with reported(PolicyError):
        if policy is not None:
            get_policy(policy)
    path = chosen_model(model)
    if not dry_run and find_spec("sglang") is None:
        raise fail(HOST_HINT)
    with reported(DriverStubError):
        command = server_command(path, port, policy=policy, host_arguments=extra)
    if dry_run:
        typer.echo(command.shell())
        return
    for note in command.notes:
        stderr.print(f"[yellow]•[/yellow] {note}", highlight=False, soft_wrap=True)
    stderr.print(f"[dim]{command.shell()}[/dim]", highlight=False, soft_wrap=True)
    # Become the server: Ctrl-C, signals and the exit code are its own.
    os.execvpe(command.arguments[0], command.arguments, command.full_environment())
