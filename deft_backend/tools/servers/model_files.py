"""Files of a model, which the user names by a folder or by a hub name such as ``Qwen/Qwen3-8B``."""

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_OTHER_HUBS = ("SGLANG_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE")


class ModelFilesError(ValueError):
    """The model is not a folder, and neither the hub nor its cache has it."""


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


def model_file(model: str, name: str, revision: str | None = None) -> Path | None:
    """A file of a model (a folder, or a hub name), downloaded if needed; None if the model has
    none. Raises ModelFilesError, which says why and what to do, if the model cannot be found.
    """
    folder = Path(model)
    if os.path.isdir(folder):
        return folder / name if os.path.isfile(folder / name) else None
    if not is_hub_name(model):
        raise ModelFilesError(
            f"cannot read {name} of the model {model}: it is neither a folder nor a name on the "
            "Hugging Face hub. Pass a checkpoint's folder"
        )
    try:
        hub: Any = import_module("huggingface_hub")
        errors: Any = import_module("huggingface_hub.errors")
    except ImportError:
        raise ModelFilesError(
            f"the model {model} is not a folder, and huggingface_hub, which looks up hub names, is "
            "not installed. Run: pip install huggingface_hub, or pass a checkpoint's folder"
        ) from None
    at = f"{model} at revision {revision}" if revision else model
    try:
        return Path(hub.hf_hub_download(model, name, revision=revision))
    except errors.GatedRepoError:
        reason = "the hub asks for permission to read it. Accept its terms there, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such model, or a private one. Check the name, or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = "the hub has no such revision of it. Check --revision"
    except errors.LocalEntryNotFoundError:
        reason = (
            f"{name} is not in the hub's cache on this machine, and HF_HUB_OFFLINE forbids to ask "
            "the hub. Download the model first, unset HF_HUB_OFFLINE, or pass a checkpoint's folder"
            if hub.constants.HF_HUB_OFFLINE
            else f"{name} is not in the hub's cache on this machine, and the hub does not answer. "
            "Check the connection (HF_ENDPOINT, proxies), or pass a checkpoint's folder"
        )
    except errors.EntryNotFoundError:
        return None
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        reason = f"{error}"
    raise ModelFilesError(f"{at} is not a folder here, and cannot be read from the hub: {reason}")
