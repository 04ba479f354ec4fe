"""Traces of arrivals in Mooncake's format: read, checked, and turned into prompts."""

import json
from pathlib import Path

import pytest

from deft_backend.tools.ab.workloads import trace_workload
from deft_backend.tools.traces.arrivals import Arrival, TraceError, load_arrivals, shared_tokens
from drawings import check_drawn

LINE = {"timestamp": 27482, "input_length": 1055, "output_length": 52, "hash_ids": [46, 47, 2353]}


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


def test_equal_ids_share_text_and_nothing_else_does():
    arrivals = [
        Arrival(1000, 1200, 5, (1, 2, 3)),
        Arrival(1500, 1100, 5, (1, 2, 3)),
        Arrival(3000, 1536, 5, (1, 9, 10)),
        Arrival(3000, 600, 5, (1,)),  # the rest has no id
        Arrival(3000, 600, 5, (1,)),
    ]
    traffic = trace_workload(arrivals, "x", 4.0)
    assert [request.at for request in traffic.requests] == [0.0, 0.5, 2.0, 2.0, 2.0]
    texts = [request.own_part() for request in traffic.requests]
    assert [len(text) for text in texts] == [4 * arrival.input_length for arrival in arrivals]
    block = 512 * 4
    assert texts[0].startswith(texts[1])
    assert texts[2][:block] == texts[0][:block] == texts[3][:block]
    for first, second in ((texts[0], texts[2]), (texts[3], texts[4])):
        assert first[block : block + 8] != second[block : block + 8]
    assert shared_tokens(arrivals) == 512 + 512 + 76 + 512 + 512 + 512


def test_what_is_no_trace_is_refused_as_drawn(tmp_path):
    """The file has a second line of a trace, and then its arrival or what is wrong with it."""
    path, every = Path(__file__).with_name("arrivals.txt"), []
    for line in path.read_text().splitlines()[::2]:
        try:
            said = load_arrivals(written(tmp_path, LINE, line))[-1]
        except TraceError as error:
            said = str(error).replace(str(tmp_path), "TMP")
        every += [line, str(said)]
    check_drawn("\n".join(every) + "\n", path)


def test_files_that_hold_no_trace_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"cannot read the trace .*: No such file"):
        load_arrivals(tmp_path / "none")
    with pytest.raises(TraceError, match="holds no request"):
        load_arrivals(written(tmp_path, ""))
    (tmp_path / "trace.jsonl").write_bytes(b"\xff")
    with pytest.raises(TraceError, match="it is not UTF-8"):
        load_arrivals(tmp_path / "trace.jsonl")
