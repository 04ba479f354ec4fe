"""SGLang's own test of its deterministic mode, over a server with tree attention."""

from importlib import import_module

import pytest

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


@pytest.fixture(scope="module")
def server(byte_model):
    command = server_command(str(byte_model), free_port(), host_arguments=FLAGS.split(), gpu=True)
    log = byte_model.parent / "deterministic.log"
    with ServerProcess(command, log, timeout=200.0) as process:
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
