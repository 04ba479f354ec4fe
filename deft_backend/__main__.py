"""``python -m deft_backend``: the `deft` command, also where nothing is installed."""

from deft_backend.cli import app

if __name__ == "__main__":
    app(prog_name="deft")
