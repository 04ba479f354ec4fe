"""SGLang's own test of its deterministic mode, over a server with tree attention."""

import json
from importlib import import_module

import pytest

from benchmarks.e2e.served_model import write_model
from deft_backend.files.folders import state_directory
from deft_backend.settings.config import Settings
from deft_backend.tools.servers.command import free_port, server_command
from deft_backend.tools.servers.driver_stub import num_gpus
from deft_backend.tools.servers.process import ServerProcess
from integration_tests.common.server import Server

pytest.importorskip("sglang")
pytestmark = pytest.mark.skipif(not num_gpus(), reason="the mode runs on a GPU")

FLAGS = (
    "--enable-deterministic-inference --cuda-graph-backend-prefill=disabled "
    "--mem-fraction-static 0.5 --max-total-tokens 300000 --max-running-requests 64"
)


def written(folder):
    """Layers of Llama-3.1-8B with a tokenizer of bytes: prompts have a token for each character.

    A name of its own stands for each other token, so equal texts are equal answers.
    """
    write_model(folder, "llama-3.1-8b", "random", "bfloat16", layers=4)
    alphabet = import_module("tokenizers").pre_tokenizers.ByteLevel.alphabet()
    content = json.loads((folder / "tokenizer.json").read_text())
    names = [*sorted(alphabet), *list(content["model"]["vocab"])[len(alphabet) :]]
    content["model"] = {"type": "BPE", "vocab": {n: i for i, n in enumerate(names)}, "merges": []}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    content["pre_tokenizer"] = content["decoder"] = {**bytewise, "use_regex": False}
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    written(folder)
    command = server_command(str(folder), free_port(), host_arguments=FLAGS.split(), gpu=True)
    with ServerProcess(command, folder.parent / "deterministic.log", timeout=200.0) as process:
        yield Server(process, state_directory(Settings.from_env()))


@pytest.mark.parametrize("mode", ["single", "prefix", "radix_cache"])
def test_equal_requests_have_one_answer(server, mode):
    """In batches of 1 to 50 requests, behind prefixes of 1 to 4,097 tokens, cached or not."""
    theirs = import_module("sglang.test.test_deterministic")
    place = {"host": "127.0.0.1", "port": server.process.command.port}
    unique = theirs.test_deterministic(theirs.BenchArgs(**place, test_mode=mode))
    print(f"{mode}: answers of equal requests {unique}")
    assert set(unique) == {1}
    state = server.state()
    assert state["policy"] == "invariant"
    assert not state["steps_host"]
    assert not server.trouble()
