"""``python -m deft_backend``: the `deft` command, also without an installation."""

from deft_backend.cli import app

if __name__ == "__main__":
    app(prog_name="deft")
