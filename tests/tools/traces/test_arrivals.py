"""Traces of arrivals in Mooncake's format: read, checked, scaled, made, and turned into prompts."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deft_backend.cli.app import app
from deft_backend.tools.ab.workloads import trace_workload
from deft_backend.tools.harness.workload import WorkloadError, poisson
from deft_backend.tools.traces.arrivals import (
    BLOCK_TOKENS,
    Arrival,
    dump_arrivals,
    is_arrival_trace,
    load_arrivals,
    shared_tokens,
)
from deft_backend.tools.traces.made_arrivals import TraceShape, make_arrivals
from deft_backend.tools.traces.recorded_trees import TraceError

LINE = {
    "timestamp": 27482, "input_length": 1055, "output_length": 52, "hash_ids": [46, 47, 2353],
}  # fmt: skip


def written(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_a_trace_is_read_in_the_order_of_time(tmp_path):
    path = written(tmp_path, LINE, "", {**LINE, "timestamp": 5.5, "hash_ids": [46, 47]})
    assert load_arrivals(path) == [
        Arrival(5.5, 1055, 52, (46, 47)),
        Arrival(27482.0, 1055, 52, (46, 47, 2353)),
    ]
    assert load_arrivals(written(tmp_path, {**LINE, "output_length": 0}))[0].output_length == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected a JSON object"),
        ("[1]", "line 2: it is [1]; expected a JSON object"),
        ({**LINE, "timestamp": -1}, "line 2: timestamp is -1; expected milliseconds, at least 0"),
        ({**LINE, "timestamp": "9"}, "line 2: timestamp is '9'; expected a finite number"),
        ({**LINE, "input_length": 0}, "line 2: input_length is 0; expected a whole number of at"),
        ({**LINE, "hash_ids": 7}, "line 2: hash_ids is 7; expected a list of whole"),
        ({**LINE, "hash_ids": [1, "x", 3]}, "line 2: hash_ids is 'x'; expected a whole number"),
        ({**LINE, "hash_ids": [1]}, "line 2: hash_ids holds 1 ids for input_length 1055; "
         "expected 2 or 3, one for each 512 tokens"),
        ({"timestamp": 1}, "line 2: input_length is missing; expected a whole number"),
    ],
)  # fmt: skip
def test_errors_name_the_line_and_the_field(tmp_path, line, message):
    with pytest.raises(TraceError) as error:
        load_arrivals(written(tmp_path, LINE, line))
    assert message in str(error.value)


def test_files_that_hold_nothing_are_refused(tmp_path):
    with pytest.raises(TraceError, match="holds no request"):
        load_arrivals(written(tmp_path, ""))
    with pytest.raises(TraceError, match="cannot read the trace"):
        load_arrivals(tmp_path / "missing.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot read the trace"):
        load_arrivals(tmp_path / "binary.jsonl")


def test_the_two_kinds_of_traces_are_told_apart(tmp_path):
    trees = tmp_path / "trees.json"
    trees.write_text('[{"incompleted": false}]')
    assert not is_arrival_trace(trees)
    assert is_arrival_trace(written(tmp_path, LINE))
    other = tmp_path / "trace.txt"
    other.write_text(json.dumps(LINE))
    assert is_arrival_trace(other)


@given(
    st.integers(1, 40), st.integers(0, 3), st.integers(0, 2000), st.floats(1, 4), st.integers(0, 4)
)
def test_made_traces_are_traces_of_that_shape(requests, documents, system, turns, forks):
    shape = TraceShape(requests, 3.0, system, documents, 700, 50, 20, turns, 7, forks)
    arrivals = make_arrivals(shape)
    assert arrivals == make_arrivals(shape)
    assert len(arrivals) == requests
    for arrival in arrivals:
        assert len(arrival.hash_ids) == -(-arrival.input_length // BLOCK_TOKENS)
        full = min(system // BLOCK_TOKENS, len(arrival.hash_ids))
        assert arrival.hash_ids[:full] == arrivals[0].hash_ids[:full]
    # An id also stands for the text before it: it always has the same place and predecessor.
    before = {}
    for arrival in arrivals:
        for last, id in zip((-1, *arrival.hash_ids), arrival.hash_ids, strict=False):
            assert before.setdefault(id, last) == last


def test_sub_agents_fork_from_a_history_and_the_next_turn_holds_their_answers():
    arrivals = make_arrivals(TraceShape(400, 2.0, 512, 2, 2048, 3000, 100, 6.0, 3, forks=3))
    together = [
        list(group) for _, group in itertools.groupby(arrivals, lambda each: each.timestamp)
    ]
    forks = [group for group in together if len(group) == 3]
    assert len(forks) > 20
    assert {len(group) for group in together} <= {1, 2, 3}  # the last group may be cut
    returns = 0
    for group in forks:
        columns = zip(*(each.hash_ids for each in group), strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, columns))
        assert shared >= min(len(each.hash_ids) for each in group) - 1 - 8 * 3000 // BLOCK_TOKENS
        history = group[0].hash_ids[:shared]
        answers = sum(each.output_length for each in group)
        later = [each for each in arrivals if each.timestamp > group[0].timestamp
                 and each.hash_ids[: len(history)] == history]  # fmt: skip
        for each in later[:1]:
            returns += 1
            assert each.input_length > len(history) * BLOCK_TOKENS + answers
    assert returns > 20


def test_a_made_trace_can_be_read_back(tmp_path):
    path = tmp_path / "made.jsonl"
    result = CliRunner().invoke(app, ["trace", "--requests", "25", "--out", str(path)])
    assert result.exit_code == 0
    made = make_arrivals(TraceShape(requests=25))
    found = load_arrivals(path)
    assert [a.hash_ids for a in found] == [a.hash_ids for a in made]
    assert [a.timestamp for a in found] == [round(a.timestamp) for a in made]
    assert "25 requests" in result.stderr
    printed = CliRunner().invoke(app, ["trace", "--requests", "2"])
    assert printed.stdout.splitlines() == list(dump_arrivals(make_arrivals(TraceShape(requests=2))))
    assert CliRunner().invoke(app, ["trace", "--rate", "0"]).exit_code == 2


@given(st.integers(1, 3000), st.sampled_from([0.01, 0.1, 0.5, 1.0, 2.0]))
def test_a_scaled_request_keeps_its_blocks(tokens, scale):
    ids = tuple(range(-(-tokens // BLOCK_TOKENS)))
    found = Arrival(0.0, tokens, 10, ids).scaled(scale)
    assert found.input_length >= 1
    assert len(ids) == -(-found.input_length // found.block_tokens)
    assert found.input_length == pytest.approx(tokens * scale, abs=1 + 0.02 * tokens + len(ids))


def test_equal_ids_share_text_and_nothing_else_does():
    arrivals = [
        Arrival(1000, 1200, 5, (1, 2, 3)),
        Arrival(1500, 1100, 5, (1, 2, 3)),
        Arrival(3000, 1536, 5, (1, 9, 10)),
        Arrival(3000, 600, 5, (1,)),  # the rest has no id
        Arrival(3000, 600, 5, (1,)),
    ]
    traffic = trace_workload(arrivals, name="x", characters_a_token=4.0, speed=2.0)
    assert [request.at for request in traffic.requests] == [0.0, 0.25, 1.0, 1.0, 1.0]
    texts = [request.text() for request in traffic.requests]
    assert [len(text) for text in texts] == [4 * arrival.input_length for arrival in arrivals]
    block = 512 * 4
    assert texts[0].startswith(texts[1])
    assert texts[2][:block] == texts[0][:block] == texts[3][:block]
    for first, second in ((texts[0], texts[2]), (texts[3], texts[4])):
        assert first[block : block + 8] != second[block : block + 8]
    assert shared_tokens(arrivals) == 512 + 512 + 76 + 512 + 512 + 512
    other = trace_workload(arrivals, name="x", characters_a_token=4.0, seed=1)
    assert other.requests[0].text()[:8] != texts[0][:8]


def test_poisson_arrivals_have_the_rate_and_repeat():
    times, said = poisson(4000, 20.0, 3)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200.0, rel=0.1)
    assert poisson(4000, 20.0, 3)[0] == times != poisson(4000, 20.0, 4)[0]
    assert "seed 3" in said
    with pytest.raises(WorkloadError, match="rate is -1"):
        poisson(1, -1.0, 0)
