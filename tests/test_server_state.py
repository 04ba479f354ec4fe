"""The state file of a server."""

from __future__ import annotations

import json

from sglang_fakes import (
    Tree,
    make_state,
    requests_of,
)

from deft_backend.hosts.sglang.radix_forest import forest_of
from deft_backend.hosts.state import StateWriter


def test_state_file(tmp_path) -> None:
    """Written atomically, when something changed; what it holds."""
    state = make_state()
    writer = StateWriter(state, tmp_path / "made", "-pp1")
    writer.write()
    assert writer.path.name == "1-tp0-pp1.json"
    first = writer.path.read_text()
    assert json.loads(first)["forest"] is None
    writer.write()
    assert writer.path.read_text() == first  # nothing changed: not written, not even the time

    requests, _, lens = requests_of([[1, 2], [1, 2]], Tree())
    state.forest = forest_of(requests, lens)
    state.rids = ["a", "b"]
    token = 2 * 2 * 64 * 4  # keys and values, KV heads, elements, bytes
    state.count_host("small", tokens=10)
    state.count_tree(tokens=6, loaded=4, tree_layers=1)
    writer.write()
    content = json.loads(writer.path.read_text())
    assert content["schema"] == 1
    assert content["steps_host"] == {"small": 1}
    assert (content["steps_tree"], content["decode_steps"]) == (1, 2)
    assert content["kv_bytes_query_guided"] == (10 + 6) * 2 * token
    assert content["kv_bytes_read"] == (10 * 2 + 4 + 6) * token
    assert content["forest"]["order"] == [0, 1]
    assert content["forest"]["rids"] == ["a", "b"]
    assert content["forest"]["page_size"] == 1
    assert [p.name for p in writer.path.parent.iterdir()] == [writer.path.name]


def test_a_state_file_that_cannot_be_written_is_said_once(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    state = make_state()
    writer = StateWriter(state, tmp_path / "file")
    writer.write()
    state.count_host("x", 1)
    writer.write()
    assert len(caplog.records) == 1
    assert "the server's state is not written" in caplog.text
