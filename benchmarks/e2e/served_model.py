"""A model made on this machine, with its shape, weights and tokenizer.

With random weights (:mod:`random_weights`), answers depend on every part of the KV cache. With
dummy weights, which the host makes up, a server starts sooner and needs no disk space. Dummy
weights are so small that attention does not change the logits, so only times can be compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]


def _shapes() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, entry in json.loads(Path(__file__).with_name("shapes.json").read_text()).items():
        found[name] = {**found.get(entry.get("like"), {}), **entry["config"]}
    return found


SHAPES: Mapping[str, dict[str, Any]] = _shapes()
"""``config.json`` by name; ``shapes.json`` says what each shape is for."""

WEIGHTS = ("random", "dummy")


class ModelError(ValueError):
    """A checkpoint folder that cannot be served with token ids, or could not be written."""


@dataclass(frozen=True)
class Model:
    """A model to serve.

    - `path`: the checkpoint's folder; `name`: its name in rows.
    - `ids`: prompts use token ids below this one; special tokens have larger ids.
    - `context`: positions that the model supports.
    - `load_format`: the host's ``--load-format``; None leaves it to the host.
    """

    path: str
    name: str
    ids: int
    context: int
    load_format: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((Path(self.path) / "config.json").read_text())
        return config


def write_model(
    folder: Path, shape: str, weights: str, served: str, layers: int | None = None
) -> Model:
    """Write a checkpoint of `shape` with a tokenizer of as many words as the model has tokens.

    - `shape`, `weights`: one of :data:`SHAPES` and of :data:`WEIGHTS`.
    - `served`: dtype of the servers, for the model's name.
    - `layers`: write only the first layers of the shape; the model's name says how many.

    Raises ModelError if the shape has no random weights, or they could not be written; the folder
    may then hold a part of them.
    """
    config = {**SHAPES[shape]}
    if weights == "random" and config["model_type"] != "llama" and "latent" not in shape:
        raise ModelError(
            f"{shape} has no random weights; pass --weights dummy, which measures times alone"
        )
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder, config["vocab_size"])
    if weights == "random":
        _write_weights(folder)
    return written_model(folder, shape, weights, served, layers)


def written_model(
    folder: Path, shape: str, weights: str, served: str, layers: int | None = None
) -> Model:
    """The model that :func:`write_model` wrote before."""
    config = SHAPES[shape]
    part = "" if layers is None else f", {layers} of {config['num_hidden_layers']} layers"
    name = f"{shape}{part}, {weights} weights, {served}"
    load_format = "dummy" if weights == "dummy" else None
    context = config["max_position_embeddings"]
    return Model(str(folder), name, config["bos_token_id"], context, load_format)


def read_model(path: str) -> Model:
    """The user's own checkpoint; raises ModelError if its folder has no usable ``config.json``."""
    try:
        config = Model(path, "", 0, 0).config
        vocabulary, context = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} cannot be read as a checkpoint ({error!r}); expected a folder whose "
            "config.json has vocab_size and max_position_embeddings"
        ) from error
    special: list[int] = []
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        special += value if isinstance(value, list) else [value] if value is not None else []
    return Model(path, Path(path).name, min([vocabulary, *(i for i in special if i)]), context)


def _write_tokenizer(folder: Path, words: int) -> None:
    """A tokenizer of the words ``w0``, ``w1``, … with ids 0, 1, …, separated by spaces.

    The servers' completions name tokens by these words, so clients can tell their ids.
    """
    vocabulary = {f"w{i}": i for i in range(words)}
    content: dict[str, Any] = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("clean_up_tokenization_spaces", "add_bos_token"), False),
        "bos_token": f"w{words - 2}",
        "eos_token": f"w{words - 1}",
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_weights(folder: Path) -> None:
    """Write weights in a process of its own, whose GPU memory is freed when it ends.

    This process lives as long as the measured servers: a CUDA context and the caching allocator's
    gigabytes in it would reduce the KV cache of each server.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.e2e.random_weights", str(folder.resolve())],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip()[-800:] or "(nothing)"
        raise ModelError(f"random weights could not be written to {folder}: {said}")
