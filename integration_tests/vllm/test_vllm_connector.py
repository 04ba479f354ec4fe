"""Disaggregated decode: keys and values of prompts come from another server."""

import json
from dataclasses import replace

import pytest

from integration_tests.common.answers import PREFIX, TOPICS, check
from integration_tests.vllm.vllm_server import Ask, Group, running, together


@pytest.mark.rare
@pytest.mark.timeout(900)
def test_a_decode_server_reads_what_a_prefill_server_has_computed(tmp_path, adapter, model):
    """Through vLLM's reference connector, which keeps the blocks of each prompt in files."""
    asks = [Ask(PREFIX + f"Tonight it spoke of {topic}.", tokens=12) for topic in TOPICS[:4]]
    for role in ("kv_producer", "kv_consumer"):
        config = {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "stored")},
        }
        flags = ["--block-size", "16", "--max-model-len", "512", "--dtype", "float32"]
        group = Group((*flags, "--kv-transfer-config", json.dumps(config)), {"DEFT_MIN_BATCH": "1"})
        folder = tmp_path / role
        folder.mkdir()
        with running("deft", group, folder, adapter) as server:
            if role == "kv_producer":
                check(server, model, [replace(ask, tokens=1) for ask in asks])
                continue
            check(server, model, [asks[0]])
            check(server, model, [together(asks)])
            assert "External Cache Hit!" in server.log
            state = server.state()
            assert state["steps_tree"] > 0
            assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]
