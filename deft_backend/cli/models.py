"""Which model a command serves when none is named: the tiny one of the repository."""

from __future__ import annotations

from pathlib import Path

from deft_backend.cli.errors import fail

_TINY = Path("models") / "tiny-llama"


def tiny_model() -> Path | None:
    """The tiny model of the checkout that this package or the current folder belongs to."""
    places = (Path(__file__).parents[2] / _TINY, Path.cwd() / _TINY)
    return next((place for place in places if (place / "config.json").is_file()), None)


def chosen_model(model: str | None) -> str:
    """What goes to the host's ``--model-path``.

    Anything that looks like a path must be a checkpoint's folder; other names are the host's to
    look up.
    """
    if model is None:
        found = tiny_model()
        if found is None:
            raise fail(
                f"no model: this is no checkout with {_TINY}. Pass --model with a checkpoint's "
                "folder or a name that the host knows"
            )
        return str(found)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise fail(f"the model {model} holds no config.json; expected a checkpoint's folder")
        return str(path)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise fail(f"the model {model} is no folder; expected a checkpoint's folder")
    return model
