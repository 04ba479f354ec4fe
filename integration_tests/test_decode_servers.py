"""Disaggregated decode: keys and values of prompts come from another server."""

import json
from dataclasses import replace

import pytest

from integration_tests.common.answers import PREFIX, TOPICS, check, only
from integration_tests.common.server import EAGER, Ask, Group, together
from integration_tests.hosts import running

pytestmark = pytest.mark.rare


@only("sglang")
def test_a_decode_server_of_a_pair(tmp_path):
    """The host's stand-in for transfers leaves the prompts' KV blank: the host's kernel is the
    reference, in every layer.
    """
    flags = "--disaggregation-mode decode --disaggregation-transfer-backend fake "
    flags += "--disaggregation-decode-retraction-backup none"  # the default needs a GPU
    group = Group(flags, {**EAGER, "DEFT_VERIFY": "1"})
    with running("deft", group, tmp_path) as server:
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        body = {"sampling_params": sampling, "bootstrap_host": "2.2.2.2"}
        for tokens in (40, 41):
            found = server.post("generate", {**body, "input_ids": list(range(5, tokens))})
            assert len(found["output_ids"]) == 12
        assert not server.trouble()
        assert "Give --disaggregation-decode-enable-radix-cache" in server.log
        state = server.state()
        assert state["steps_tree"] > 20
        assert not state["steps_host"]


@only("vllm")
@pytest.mark.timeout(900)
def test_a_decode_server_reads_what_a_prefill_server_has_computed(tmp_path, model):
    """Through vLLM's reference connector, which keeps the blocks of each prompt in files."""
    asks = [Ask(PREFIX + f"Tonight it spoke of {topic}.", tokens=12) for topic in TOPICS[:4]]
    for role in ("kv_producer", "kv_consumer"):
        config = {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "stored")},
        }
        flags = f"--block-size 16 --max-model-len 512 --kv-transfer-config '{json.dumps(config)}'"
        group = Group(flags, EAGER)
        with running("deft", group, tmp_path / role) as server:
            if role == "kv_producer":
                check(server, model, [replace(ask, tokens=1) for ask in asks])
                continue
            check(server, model, [asks[0]])
            check(server, model, [together(asks)])
            assert "External Cache Hit!" in server.log
            state = server.state()
            assert state["steps_tree"] > 0
            assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]
