"""Rows of end-to-end runs: stored, merged, and compared with the release bars."""

import pytest

from benchmarks.e2e.serving_bars import bars
from benchmarks.e2e.serving_rows import by_case, make_row, merged, read_rows, replaced
from benchmarks.row_files import RowsError, write_rows

HEADER = {
    "device": "A GPU (CUDA 13.0)", "driver": "1", "versions": {"torch": "2"}, "commit": "abc",
    "runs": [{"command": "python -m benchmarks e2e"}],
}  # fmt: skip


def timed(backend, tpot, case=(4096, 32, 64), workload="few-shot", host="sglang", **figures):
    row = make_row(workload, host, backend, "fake", "")
    if case is not None:
        row["prefix"], row["branches"], row["suffix"] = case
    row["tpot_ms"] = tpot
    if backend in ("deft", "CUSTOM"):
        row["detail"]["steps"] = {"tree": 5, "host": {}}
    row.update(figures)
    return row


def test_rows_of_older_files_are_of_one_gpu(tmp_path):
    row = dict(timed("deft", 1.5))
    del row["tp"]
    write_rows(tmp_path / "e.json", [row], HEADER)
    assert [row["tp"] for row in read_rows(tmp_path / "e.json")[0]] == [1]


@pytest.mark.parametrize(("ours", "met"), [(3.5, True), (3.6, False)])
def test_several_gpus_have_bars_of_their_own(ours, met):
    """For both hosts, against the host's own backend, whatever the others take."""
    for host, name, reference in (("sglang", "deft", "fa3"), ("vllm", "CUSTOM", "FLASH_ATTN")):
        rows = [
            timed(backend, time, (65536, 32, 64), host=host, tp=2)
            for backend, time in ((name, ours), (reference, 10.0), ("another", 5.0))
        ]
        (bar,) = bars(rows)
        assert (bar.met, bar.asked) == (met, f"≤ 0.35 of {reference}")
        assert bar.case.endswith("on 2 GPUs")
        (alone,) = bars([dict(row, tp=1) for row in rows])
        assert alone.asked != bar.asked


def test_a_case_measured_again_takes_its_own_place():
    old = [timed("deft", 1.0), timed("fa3", 2.0)]
    again = timed("deft", 3.0)
    other_options = timed("deft", 4.0, options="--page-size 16")
    rows = replaced(old, [again, other_options])
    assert [(row["backend"], row["tpot_ms"]) for row in rows] == [
        ("deft", 3.0), ("fa3", 2.0), ("deft", 4.0),
    ]  # fmt: skip
    assert [list(backends) for backends in by_case(rows).values()] == [["deft", "fa3"], ["deft"]]


@pytest.mark.parametrize(
    "change",
    [{"gen": 9}, {"model": "another"}, {"prefix": 1}, {"branches": 1}, {"suffix": 1},
     {"workload": "documents"}, {"host": "vllm"}],
)  # fmt: skip
def test_other_requests_are_another_case(change):
    other = {**timed("deft", 9.0), **change}
    rows = replaced([timed("deft", 1.0), timed("fa3", 2.0)], [other])
    assert [list(backends) for backends in by_case(rows).values()] == [["deft", "fa3"], ["deft"]]


def test_runs_of_one_machine_are_merged(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write_rows(a, [timed("deft", 1.0), timed("fa3", 2.0)], HEADER)
    write_rows(b, [timed("fa3", 5.0), timed("triton", 7.0)], HEADER)
    rows, header = merged([a, b])
    assert {row["backend"]: row["tpot_ms"] for row in rows} == {
        "deft": 1.0, "fa3": 5.0, "triton": 7.0,
    }  # fmt: skip
    assert len(header["runs"]) == 2


@pytest.mark.parametrize("field", ["device", "driver", "versions", "commit"])
def test_runs_of_different_machines_are_not(tmp_path, field):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write_rows(a, [timed("deft", 1.0)], HEADER)
    write_rows(b, [timed("fa3", 5.0)], {**HEADER, field: "another"})
    with pytest.raises(RowsError, match=f"{field} .*another"):
        merged([a, b])


def only(rows):
    (bar,) = bars(rows)
    return bar.found, bar.met


FA3, FLASH_ATTN = {"fa3": 12.0, "flashinfer": 10.0}, {"FLASH_ATTN": 10.0, "FLASHINFER": 1.0}


@pytest.mark.parametrize(
    ("workload", "case", "peers", "met", "missed"),
    [
        # SGLang against the best other, vLLM against FLASH_ATTN.
        ("few-shot", (65536, 32, 64), FA3, 4.0, 4.02),
        ("few-shot", (16384, 64, 64), FA3, 5.0, 5.02),
        ("few-shot", (4096, 128, 64), FA3, 6.5, 6.52),
        ("few-shot", (4096, 32, 64), FA3, 8.5, 8.52),
        ("few-shot", (65536, 32, 64), FLASH_ATTN, 4.2, 4.22),
        ("few-shot", (16384, 64, 64), FLASH_ATTN, 5.0, 5.02),
        ("few-shot", (4096, 128, 64), FLASH_ATTN, 6.2, 6.22),
        ("unshared", (0, 32, 2048), {"fa3": 10.0, "flashinfer": 9.0}, 10.2, 10.21),
        ("tree-of-thoughts sorting", None, {"fa3": 10.0, "triton": 12.0}, 9.9, 10.0),
        ("scheduler", (0, 32, 256), {"fa3": 1.0}, 1.029, 1.031),
    ],
)
def test_each_case_has_its_bar(workload, case, peers, met, missed):
    host, name = ("vllm", "CUSTOM") if "FLASH_ATTN" in peers else ("sglang", "deft")
    others = [timed(peer, time, case, workload, host) for peer, time in peers.items()]
    # A peer that failed is no comparison.
    others.append(timed("triton", 0.1, case, workload, host, error="it died"))
    for time, expected in ((met, True), (missed, False)):
        ours = timed(name, time, case, workload, host)
        if workload == "unshared":
            ours["detail"] = {}  # the host's own kernel decodes there
        assert only([ours, *others])[1] is expected


def test_a_peer_without_a_sensible_time_is_none():
    assert only([timed("deft", 1.0), timed("fa3", -44.0)])[1] is None
    assert only([timed("deft", 9.0), timed("fa3", -44.0), timed("triton", 10.0)])[1] is False


def test_an_idle_plugin_meets_no_bar():
    ours = timed("deft", 1.0)
    ours["detail"] = {"steps": {"tree": 0, "host": {"batch smaller than DEFT_MIN_BATCH=2": 7}}}
    idle = ("no step counted through tree attention", None)
    assert only([ours, timed("fa3", 10.0)]) == idle
    name = "generated-shared-prefix:default"
    client = timed("deft", 1.0, None, name, tokens_per_s=9.0, ttft_ms=1.0)
    client["detail"] = ours["detail"]
    assert only([client, timed("fa3", 1.0, None, name, tokens_per_s=1.0, ttft_ms=1.0)]) == idle
    traffic = timed("deft", None, (8, 4, 4), "mixed-traffic part 1")
    checked = {"tokens": 9, "wrong": 0, "ties": 2}
    traffic["detail"] = ours["detail"] | {"checked": checked}
    assert only([traffic]) == (f"9 tokens: 0 wrong, 2 ties; {idle[0]}", None)


def test_what_failed_is_not_met():
    assert only([timed("deft", None, error="died\nof it"), timed("fa3", 1.0)]) == ("died", False)
    assert only([timed("deft", 1.0)])[1] is None


def test_the_hosts_clients_are_held_to_throughput_and_first_token():
    def row(backend, speed, ttft, **figures):
        name = "generated-shared-prefix:default"
        return timed(backend, 1.0, None, name, tokens_per_s=speed, ttft_ms=ttft, **figures)

    found = bars([row("deft", 101.0, 10.3), row("fa3", 90.0, 10.0), row("triton", 100.0, 12.0)])
    assert [bar.met for bar in found] == [True, True]
    found = bars([row("deft", 99.0, 10.4), row("fa3", 90.0, 10.0), row("triton", 100.0, 12.0)])
    assert [bar.met for bar in found] == [False, False]
    assert found[1].found == "1.040"
    # A peer that failed during the run is not a comparison.
    found = bars(
        [row("deft", 101.0, 10.3), row("fa3", 90.0, 10.0), row("triton", 9.0, 1.0, error="x")]
    )
    assert [bar.met for bar in found] == [True, True]


def test_traffic_is_held_to_its_tokens():
    def row(wrong, trouble=0, tokens=9, **figures):
        found = timed("deft", None, (8, 4, 4), "mixed-traffic part 1", **figures)
        checked = {"tokens": tokens, "wrong": wrong, "ties": 2}
        found["detail"] |= {"checked": checked, "log_trouble": trouble}
        return [found]

    assert only(row(0)) == ("9 tokens: 0 wrong, 2 ties", True)
    assert only(row(1))[1] is False
    assert only(row(0, trouble=1))[1] is False
    assert only(row(0, tokens=0))[1] is False  # nothing was checked
    assert only(row(0, error="3 requests failed"))[1] is False
    unchecked = timed("deft", None, (8, 4, 4), "mixed-traffic part 1")
    assert only([unchecked]) == ("not checked against the reference yet", None)
    unchecked["detail"]["check_with"] = "--backends fa3 --workloads traffic"
    said = (
        "not checked yet; run the same command with --backends fa3 --workloads traffic, into the "
        "same --out"
    )
    assert only([unchecked]) == (said, None)
