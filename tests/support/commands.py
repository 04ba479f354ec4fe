"""Run a command line in this process."""

from typer.testing import CliRunner

from deft_backend.cli.app import app as deft


def run(*arguments, app=deft, **environment):
    """Exit code, standard output and standard error of `deft`, or of another application."""
    shown = {"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner(env={**shown, **environment}).invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
