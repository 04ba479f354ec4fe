"""A small model with random weights, and a server for every variant that this machine can run."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.e2e.served_model import write_model
from deft_backend.tools.servers.command import StartError
from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.common.adapter import write_adapter
from integration_tests.gpu.variants import ADAPTERS, FLEET, running


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Four layers with the heads of Llama-3.1-8B."""
    return write_model(tmp_path_factory.mktemp("model"), "four-layers", "random", "bfloat16")


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """Layers of Llama-3.1-8B with a tokenizer of bytes: prompts have a token for each character.

    A name of its own stands for each other token, so equal texts are equal answers.
    """
    folder = tmp_path_factory.mktemp("bytes")
    write_model(folder, "llama-3.1-8b", "random", "bfloat16", layers=4)
    alphabet = import_module("tokenizers").pre_tokenizers.ByteLevel.alphabet()
    content = json.loads((folder / "tokenizer.json").read_text())
    names = [*sorted(alphabet), *list(content["model"]["vocab"])[len(alphabet) :]]
    content["model"] = {"type": "BPE", "vocab": {n: i for i, n in enumerate(names)}, "merges": []}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    content["pre_tokenizer"] = content["decoder"] = {**bytewise, "use_regex": False}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def servers(request, model, tmp_path_factory):
    """A server for each variant that a test of this run asks for or is checked by, by its name.

    A server that did not start is the reason. Variants that need too many GPUs are missing.
    """
    gpus = num_gpus()
    adapters = tmp_path_factory.mktemp("adapters")
    for seed, adapter in enumerate(ADAPTERS):
        write_adapter(adapters / adapter, Path(model.path), seed)
    asked = {}
    for item in request.session.items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("variant")
        while name in FLEET.servers and name not in asked:
            asked[name] = None
            name = FLEET.servers[name].against
    names = [name for name in asked if FLEET.servers[name].ranks <= gpus]
    with running(FLEET, names, gpus, model, adapters, tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.fixture
def variant(request):
    """The name of a variant; skips if this machine has too few GPUs."""
    name = request.param
    if FLEET.servers[name].ranks > num_gpus():
        pytest.skip(f"{name} needs {FLEET.servers[name].ranks} GPUs")
    return name


@pytest.fixture
def pair(variant, servers):
    """The variant's server, and the server that checks its answers."""
    ours, theirs = servers[variant], servers[FLEET.servers[variant].against]
    for server in (ours, theirs):
        if isinstance(server, StartError):
            raise server
    return ours, theirs
