"""The model of a command: a folder, a hub name, or the repository's tiny model."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from deft_backend.cli.errors import fail, reported
from deft_backend.files.private_files import parsed
from deft_backend.tools.servers.command import value_of

_TINY = Path("models") / "tiny-llama"
_REVISION = "--revision"
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
RevisionOption = Annotated[
    str | None, Option(help="Branch, tag or commit of a hub name; default: main.")
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
        try:
            hub: Any = import_module("huggingface_hub")
            errors: Any = import_module("huggingface_hub.errors")
        except ImportError:
            raise ModelFilesError(
                f"the model {model} is not a folder, and huggingface_hub, which looks up hub "
                "names, is not installed. Run: pip install huggingface_hub, or pass a "
                "checkpoint's folder"
            ) from None
        at = f"{model} at revision {revision}" if revision else model
        try:
            return Path(hub.hf_hub_download(model, name, revision=revision))
        except errors.GatedRepoError:
            reason = (
                "the hub asks for permission to read it. Accept its terms there, and set HF_TOKEN"
            )
        except errors.RepositoryNotFoundError:
            reason = "the hub has no such model, or a private one. Check the name, or set HF_TOKEN"
        except errors.RevisionNotFoundError:
            reason = "the hub has no such revision of it. Check --revision"
        except errors.LocalEntryNotFoundError:
            reason = (
                f"{name} is not in the hub's cache on this machine, and HF_HUB_OFFLINE forbids to "
                "ask the hub. Download the model first, unset HF_HUB_OFFLINE, or pass a "
                "checkpoint's folder"
                if hub.constants.HF_HUB_OFFLINE
                else f"{name} is not in the hub's cache on this machine, and the hub does not "
                "answer. Check the connection (HF_ENDPOINT, proxies), or pass a checkpoint's folder"
            )
        except errors.EntryNotFoundError:
            return None
        except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
            reason = f"{error}"
        said = "is not a folder here, and cannot be read from the hub"
        raise ModelFilesError(f"{at} {said}: {reason}")

    def check(self) -> None:
        """Look up a hub name before a server starts; raises ModelFilesError if it is wrong."""
        if not os.path.isdir(self.name) and is_hub_name(self.name):
            self.file("config.json")


def tiny_model() -> Path | None:
    places = (Path(__file__).parents[2] / _TINY, _TINY)
    found = (place for place in places if os.path.isfile(place / "config.json"))
    return next((place.absolute() for place in found), None)


@reported(ModelFilesError)
def chosen_model(model: str | None, revision: str | None = None) -> ChosenModel:
    """The model for the host's ``--model-path``, without asking the hub; fails in one line."""
    if model is None:
        if revision is not None:
            raise ModelFilesError(
                "--revision is given without --model; expected the model's hub name"
            )
        tiny = tiny_model()
        if tiny is None:
            raise ModelFilesError(
                f"no model: this is not a checkout with {_TINY}. Pass --model with a checkpoint's "
                "folder or a hub name such as Qwen/Qwen3-8B"
            )
        return ChosenModel(str(tiny))
    for option, value in (("model", model), ("revision", revision)):
        if value is not None and not value.strip():
            raise ModelFilesError(
                f"the {option} is {value!r}; expected a checkpoint's folder, or a hub name such as "
                "Qwen/Qwen3-8B and its branch, tag or commit"
            )
    # These functions of `os.path` take any text; those of `Path` raise for impossible names.
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        if not any(os.path.isfile(os.path.join(path, name)) for name in _CONFIGURATIONS):
            raise ModelFilesError(
                f"the model {model} holds no config.json; expected a checkpoint's folder"
            )
        if revision is not None:
            raise ModelFilesError(
                f"--revision is {revision!r}, but the model {model} is a folder; leave it out"
            )
        return ChosenModel(str(Path(path)))
    if os.path.isfile(path) and path.endswith(".gguf"):
        return ChosenModel(str(Path(path)))
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if os.path.exists(path) or (looks_like_path and "://" not in model):
        raise ModelFilesError(
            f"the model {model} is not a folder; expected a checkpoint's folder, or a hub name "
            "such as Qwen/Qwen3-8B"
        )
    if revision is None:
        _refuse_misspelt(model)
    return ChosenModel(model, revision)


def _refuse_misspelt(model: str) -> None:
    """Refuse a missing checkpoint in a folder of checkpoints: asking the hub takes 25 s."""
    parent = Path(os.path.dirname(model))
    if parent == Path() or not os.path.isdir(parent):
        return
    siblings = []
    with suppress(OSError):  # a folder that this user may not read
        names = sorted(os.listdir(parent))
        siblings = [name for name in names if os.path.isfile(parent / name / "config.json")]
    if siblings:
        near = get_close_matches(os.path.basename(model), siblings, n=1)
        hint = f"did you mean {parent / near[0]}?" if near else f"it holds {', '.join(siblings)}."
        raise ModelFilesError(
            f"the folder {parent} holds no model {os.path.basename(model)}; {hint} If you mean the "
            "hub's model of this name, pass --revision main"
        )


def served_model(
    model: str | None, revision: str | None, host_arguments: Sequence[str]
) -> tuple[ChosenModel, list[str]]:
    """The model to serve, and the host's arguments with its revision, which they may give."""
    arguments = list(host_arguments)
    passed = value_of(_REVISION, arguments)
    if revision is not None and passed is not None:
        raise fail(f"{_REVISION} is given twice: {revision!r}, and {passed!r} behind '--'")
    chosen = chosen_model(model, revision)
    if revision is not None:
        arguments = [_REVISION, revision, *arguments]
    return ChosenModel(chosen.name, revision or passed), arguments


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
