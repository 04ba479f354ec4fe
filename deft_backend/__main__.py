"""The `deft` command; ``python -m deft_backend`` runs it without an installation."""

import io
import sys

from deft_backend.cli.ctrl_c import leave_at_once


def main() -> None:
    """Run the command."""
    leave_at_once()  # imports take seconds
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the locale may lack the signs of our tables
    from deft_backend.cli.app import app

    app(prog_name="deft")


if __name__ == "__main__":
    main()
