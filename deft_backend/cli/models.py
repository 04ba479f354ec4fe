"""The model of a command: a folder, a hub name, or the repository's tiny model."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from deft_backend.cli.errors import reported
from deft_backend.files.private_files import parsed
from deft_backend.tools.servers.command import value_of

_TINY = Path("models") / "tiny-llama"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_OTHER_HUBS = ("SGLANG_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE")
_CONFIGURATIONS = ("config.json", "params.json")
"""A folder with either file is a checkpoint; the second is Mistral's own format, which vLLM
reads."""

ModelOption = Annotated[
    str | None,
    Option(
        help="Checkpoint folder or hub name (Qwen/Qwen3-8B); default: models/tiny-llama of the "
        "checkout."
    ),
]


class ModelFilesError(ValueError):
    """The model is not a folder, and neither the hub nor its cache has it."""


@dataclass(frozen=True)
class ChosenModel:
    name: str  # folder, hub name, or any other name that the host accepts
    revision: str | None = None  # branch, tag or commit of a hub name

    def file(self, name: str) -> Path | None:
        """One of its files, downloaded if needed; None if it has no such file. Raises
        ModelFilesError, which says why and what to do, if the model cannot be found.
        """
        model, revision = self.name, self.revision
        folder = Path(model)
        if os.path.isdir(folder):
            return folder / name if os.path.isfile(folder / name) else None
        if not is_hub_name(model):
            raise ModelFilesError(
                f"cannot read {name} of the model {model}: it is neither a folder nor a name on "
                "the Hugging Face hub. Pass a checkpoint's folder"
            )
        hub: Any = import_module("huggingface_hub")  # every host has it
        errors: Any = import_module("huggingface_hub.errors")
        try:
            return Path(hub.hf_hub_download(model, name, revision=revision))
        except errors.LocalEntryNotFoundError:
            reason = (
                f"{name} is not in the hub's cache on this machine, and the hub does not answer or "
                "HF_HUB_OFFLINE forbids to ask it. Check the connection (HF_ENDPOINT, proxies), or "
                "pass a checkpoint's folder"
            )
        except errors.EntryNotFoundError:
            return None
        except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
            reason = " ".join(str(error).split())  # with the remedy, as HF_TOKEN
        at = f"{model} at revision {revision}" if revision else model
        raise ModelFilesError(f"{at} is not a folder here, and the hub cannot be used: {reason}")

    def check(self) -> None:
        """Look up a hub name before a server starts; raises ModelFilesError if it is wrong."""
        if not os.path.isdir(self.name) and is_hub_name(self.name):
            self.file("config.json")


def tiny_model() -> Path | None:
    places = (Path(__file__).parents[2] / _TINY, _TINY)
    found = (place for place in places if os.path.isfile(place / "config.json"))
    return next((place.absolute() for place in found), None)


@reported(ModelFilesError)
def chosen_model(model: str | None) -> ChosenModel:
    """The model for the host's ``--model-path``, without asking the hub; fails in one line."""
    if model is None:
        tiny = tiny_model()
        if tiny is None:
            raise ModelFilesError(
                f"no model: this is not a checkout with {_TINY}. Pass --model with a checkpoint's "
                "folder or a hub name such as Qwen/Qwen3-8B"
            )
        return ChosenModel(str(tiny))
    # These functions of `os.path` take any text; those of `Path` raise for impossible names.
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        if not any(os.path.isfile(os.path.join(path, name)) for name in _CONFIGURATIONS):
            raise ModelFilesError(
                f"the model {model} holds no config.json; expected a checkpoint's folder"
            )
        return ChosenModel(str(Path(path)))
    if os.path.isfile(path) and path.endswith(".gguf"):
        return ChosenModel(str(Path(path)))
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if not model.strip() or os.path.exists(path) or (looks_like_path and "://" not in model):
        raise ModelFilesError(
            f"the model {model!r} is not a folder; expected a checkpoint's folder, or a hub name "
            "such as Qwen/Qwen3-8B"
        )
    return ChosenModel(model)


def served_model(model: str | None, host_arguments: Sequence[str]) -> ChosenModel:
    """The model to serve, at the revision that the host's arguments name."""
    return ChosenModel(chosen_model(model).name, value_of("--revision", host_arguments))


def text_config(path: Path) -> dict[str, Any]:
    """A ``config.json``, with what it says of the language model in place of the whole."""
    content: dict[str, Any] = parsed(path.read_bytes())
    return {**content, **content.get("text_config", {})}


def served_context(model: ChosenModel, host_arguments: Sequence[str]) -> int | None:
    """Tokens of prompt and answer that a server takes; None if only the server can tell."""
    for option in ("--context-length", "--max-model-len"):
        given = value_of(option, host_arguments)
        if given is not None:
            return int(given) if given.isdecimal() else None
    with suppress(OSError, ValueError, AttributeError, TypeError, ModelFilesError):
        path = model.file("config.json")
        config = {} if path is None else text_config(path)
        longest = config.get("max_position_embeddings")
        if isinstance(longest, int) and not config.get("rope_scaling"):  # which may stretch it
            return longest
    return None


def is_hub_name(model: str) -> bool:
    """Whether a name that is not a folder names a repository of the Hugging Face hub.

    Hosts also accept other names: URLs and ``repository:quantization``. If a variable such as
    ``VLLM_USE_MODELSCOPE`` is set, they also accept names of another hub.

    >>> is_hub_name("Qwen/Qwen3-8B"), is_hub_name("s3://bucket/model"), is_hub_name("a/b:Q4_K_M")
    (True, False, False)
    """
    if any(os.environ.get(name, "").lower() in ("1", "true") for name in _OTHER_HUBS):
        return False
    return _HUB_NAME.fullmatch(model) is not None
