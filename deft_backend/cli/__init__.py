"""The `deft` command: serve, compare, diagnose and explain."""

from deft_backend.cli.app import app

__all__ = ["app"]
