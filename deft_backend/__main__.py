"""The `deft` command; ``python -m deft_backend`` runs it without an installation."""

import io
import signal
import sys


def main() -> None:
    # Ctrl-C while modules load ends the process at once: extensions turn an exception that reaches
    # them into other errors. A job in the background ignores the signal, and keeps doing so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the locale may lack the signs of our tables
    from deft_backend.cli.app import app

    app(prog_name="deft")


if __name__ == "__main__":
    main()
