"""Whole runs with servers of our own: e2e, start, load and soak; the model and the command."""

import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench_e2e_fakes import GAP, fake_launch
from benchmarks import host_client
from benchmarks import load as loads
from benchmarks import soak as soaks
from benchmarks import start as starts
from benchmarks.__main__ import app_of
from benchmarks.e2e import command
from benchmarks.e2e.launch import HOSTS, ChoiceError, Drafts, Launch, parse_drafts
from benchmarks.e2e.plot import draw
from benchmarks.e2e.rows import by_case, read_rows
from benchmarks.e2e.run import Recorder, Side, record
from benchmarks.e2e.served_model import write_model
from benchmarks.e2e.workloads import BATCHES, Job, Sizes, few_shot
from benchmarks.load import Load, figures_of, read_loads
from benchmarks.row_files import RowsError, write_rows

GRID = Job("few-shot", few_shot, BATCHES, Sizes(16, 3, 4), 6, 1)
OTHER = Job("unshared", few_shot, BATCHES, Sizes(0, 2, 4), 4, 1)


@pytest.fixture(autouse=True)
def one_commit(monkeypatch):
    """An edit of the checkout during the tests must not count as another build."""
    monkeypatch.setenv("GIT_COMMIT", "abc")


def run(tmp_path, backends, jobs, host="sglang", together=False, **changed):
    said = []
    sides = [Side(fake_launch(host, **changed), backend) for backend in backends]
    recorder = Recorder(tmp_path / "e.json", "the command", sides, "tie")
    rows = record(sides, jobs, recorder, tmp_path / "logs", said.append, together=together)
    assert read_rows(tmp_path / "e.json")[0] == rows
    return {(row["workload"], row["backend"]): row for row in rows}, said


@pytest.mark.parametrize("together", [False, True])
def test_what_a_server_does_not_do_is_a_row_with_an_error(tmp_path, together):
    backends = ("right", "crashes", "dies", "tie")
    rows, said = run(tmp_path, backends, [GRID, OTHER], together=together)
    if together:  # in turn, and nobody is always first
        done = [line.split(":")[0] for line in said if "to the first token" in line]
        assert done == ["right", "tie", "tie", "right"]
    assert len(rows) == 8
    for workload in ("few-shot", "unshared"):
        assert "the server does not start" in rows[workload, "crashes"]["error"]
        assert "ended with exit code" in rows[workload, "dies"]["error"]
        assert rows[workload, "right"]["error"] is rows[workload, "tie"]["error"] is None
    for row in (rows["few-shot", "right"], rows["few-shot", "tie"]):
        assert None not in (row["ttft_ms"], row["itl_p99_ms"], row["tokens_per_s"])
        assert len(row["detail"]["tpot_runs_ms"]) == 1
        assert (row["prefix"], row["branches"], row["suffix"], row["gen"]) == (16, 3, 4, 6)
    found = rows["few-shot", "right"]["detail"]["agreement"]
    assert (found["against"], found["requests"], found["equal_answers"]) == ("tie", 3, 0)
    assert "agreement" not in rows["few-shot", "tie"]["detail"]


def test_runs_add_to_the_same_file(tmp_path, monkeypatch):
    run(tmp_path, ("right",), [GRID])
    both, _ = run(tmp_path, ("tie",), [GRID])
    assert set(both) == {("few-shot", "right"), ("few-shot", "tie")}
    # A policy is another side of the same case.
    _, said = run(tmp_path, ("right",), [GRID], policy="fasttree")
    assert any(line.startswith("right, fasttree: few-shot") for line in said if ":" in line)
    rows, header = read_rows(tmp_path / "e.json")
    (sides,) = by_case(rows).values()
    assert sides.keys() == {"right", "tie", "right, fasttree"}
    assert [entry["policy"] for entry in header["runs"]] == [None, None, "fasttree"]
    drawn = tmp_path / "drawn.json"
    write_rows(drawn, [{**row, "tpot_ms": 1.5} for row in rows], header)
    assert draw(drawn).stat().st_size > 5000
    monkeypatch.setenv("GIT_COMMIT", "def")
    with pytest.raises(RowsError, match="commit"):
        run(tmp_path, ("tie",), [GRID])


def test_the_tokenizer_gives_back_the_ids_that_it_decoded(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = write_model(tmp_path, "tiny", "dummy", "float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 1024
    ids = [0, 5, 1021, 77, 77, 300]
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert tokenizer.decode([17]) == "w17"
    assert (model.load_format, model.ids, model.context) == ("dummy", 1022, 16384)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_server_drafts_with_forced_acceptance(tmp_path):
    model = write_model(tmp_path, "tiny", "dummy", "float32")
    launch = Launch(HOSTS["sglang"], model, ("-x",), drafts=parse_drafts("eagle,60,3"))
    made = launch.command("deft")
    config = json.loads((tmp_path / "draft/config.json").read_text())
    assert (config["num_hidden_layers"], config["architectures"]) == (1, ["LlamaForCausalLMEagle"])
    assert made.environment["SGLANG_SIMULATE_ACC_LEN"] == "3"
    options = dict(zip(made.arguments, made.arguments[1:], strict=False))
    assert options["--speculative-num-draft-tokens"] == "60"
    assert (options["--speculative-eagle-topk"], options["--speculative-num-steps"]) == ("8", "5")
    given = json.loads(Drafts("mtp", 4, 2.5).options("vllm", model)[1])
    assert given["num_speculative_tokens"] == 3


def test_a_started_server_is_measured_or_lost(tmp_path):
    row = starts._started(fake_launch(), "right", "full", 3, tmp_path, Console(quiet=True))
    assert (row["error"], len(row["batches_ms"])) == (None, starts.BATCHES)
    assert row["seconds"] > 0
    assert (row["host"], row["tp"], row["prefix"], row["branches"]) == ("sglang", 1, 64, 3)
    lost = starts._started(fake_launch(), "crashes", "empty", 3, tmp_path, Console(quiet=True))
    assert ("the server does not start" in lost["error"], lost["seconds"]) == (True, None)


LOAD = Load("few", prefixes=2, prefix=12, own=3, gen=5, requests=9, rate=30.0)


def test_an_open_loop_measures_every_gap(tmp_path, monkeypatch):
    monkeypatch.setattr(loads, "HEAD_START", 2.0)
    console, out = Console(quiet=True), tmp_path / "load.json"
    unlimited = replace(LOAD, rate=None, requests=5)
    table, rows = [LOAD, unlimited], []
    measured = figures_of, rows.append
    loads._measure_all(fake_launch(), ("right",), ["0"], table, 2, out, console, *measured)
    assert [(row["load"], row["rate"]) for row in rows] == [("few", 30.0), ("few", None)]
    for row in rows:
        assert not row["failures"], row
        assert 0 < row["itl_ms"]["p50"] < 100 > row["itl_ms"]["mean"] > 0.2
        assert row["output_tokens_per_s"] > 0
    assert rows[0]["duration_s"] >= LOAD.arrivals()[-1]


def test_loads_are_the_files():
    first, *_, again = read_loads(["8x8192", "nothing-shared", "8x8192@12"])
    assert (first.prefixes, first.prefix, first.rate) == (8, 8192, 12)
    prompts = [first.prompt(number, 97) for number in (0, 8, 1)]
    assert prompts[0][:8192] == prompts[1][:8192] != prompts[2][:8192]
    assert len({*prompts, again.prompt(0, 97)}) == 4  # no cache holds a repeat's prompts
    given = ["2x32768@5", "8x2048", "2x32768@unlimited"]
    assert [each.rate for each in read_loads(given)] == [5.0, 12, 24, None, None]
    assert first.arrivals() == sorted(first.arrivals())
    assert first.arrivals()[-1] == pytest.approx(384 / 12, rel=0.3)


def test_a_hosts_client_gives_a_row(tmp_path, monkeypatch):
    said = {"completed": 8, "duration": 2.0, "output_throughput": 5.0, "mean_tpot_ms": 3.0}
    said |= {f"{n}_{m}_ms": 1.5 for n in ("mean", "median", "p95", "p99") for m in ("itl", "ttft")}
    stub = [sys.executable, "-c", f"import sys; open(sys.argv[1], 'w').write({json.dumps(said)!r})"]
    monkeypatch.setattr(host_client, "client_command", lambda *given: [*stub, str(given[3])])
    row = host_client.figures_by_host("vllm", "/m", 2, tmp_path, "url", LOAD)
    assert (row["itl_ms"]["p50"], row["duration_s"], row["failures"]) == (1.5, 2.0, 1)  # 8 of 9
    with pytest.raises(ChoiceError, match="several turns"):
        host_client.check_loads("vllm", read_loads(["turns-8x2048"]), by_host=True)


TRAFFIC = soaks.Traffic(
    0.5, 1, workers=3, documents=2, document_tokens=12, most_question=4, most_answer=9, samples=5
)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("backend", "wrong"), [("right", False), ("wrong", True)])
def test_traffic_is_checked_against_the_reference(tmp_path, monkeypatch, backend, wrong, together):
    monkeypatch.setattr(soaks, "tolerance_of", lambda *_: GAP)
    launch = fake_launch()
    launch = replace(launch, host=replace(launch.host, backends=(backend, "right")))
    row = soaks.run_part(launch, "right", TRAFFIC, tmp_path, Console(quiet=True), together)
    assert (row["error"], bool(row["wrong"])) == (None, wrong)
    assert row["checked_answers"] == min(5, row["finished"]) >= 3
    lost = soaks.run_part(launch, "crashes", TRAFFIC, tmp_path, Console(quiet=True), together)
    assert ("does not start" in lost["error"], lost["finished"] > 0) == (True, not together)
    assert soaks.totals([row])["ok"] is not wrong
    assert not soaks.totals([row, {**row, "error": "died"}])["ok"]
    assert not soaks.totals([{**row, "wrong": 0, "checked_tokens": 0}])["ok"]


BUSY = [10.0, 30.0, 90.0, 31.0, 70.0, 70.0, 90.0, 80.0, 31.0, 99.0]


@pytest.mark.parametrize(
    ("name", "mib", "begin", "end"),
    [
        ("rss_mib", [min(1000.0, 250.0 * at) for at in range(21)], 1000.0, 1000.0),
        ("rss_mib", BUSY, 90.0, 99.0),
        ("gpu_mib", BUSY, 31.0, 31.0),  # other processes on the GPU are no growth
    ],
)
def test_the_growth_of_memory_after_the_first_fifth(name, mib, begin, end):
    samples = [{"s": float(at), "used": used, name: used} for at, used in enumerate(mib)]
    found = soaks.level(samples, name)
    assert found == {"after_first_fifth": begin, "end": end, "growth": end - begin}
    assert soaks.is_level(found)
    assert not soaks.is_level({**found, "end": begin + 100.0, "growth": 100.0})
    assert soaks.level(samples, "other") is None


def test_the_command_measures_and_shows(tmp_path, monkeypatch):
    out = tmp_path / "e.json"
    monkeypatch.setattr(command, "checked_backends", lambda host, names: tuple(names))
    monkeypatch.setattr(
        command, "Launch", lambda host, model, options, **_: fake_launch(options=options)
    )
    words = ["e2e", "--host", "sglang", "--backends", "right, crashes", "--shape", "tiny"]
    words += ["--case", "16,3,4", "--weights", "dummy", "--out", str(out), "--", "--page-size", "1"]
    done = CliRunner().invoke(app_of(["e2e"]), words)
    assert done.exit_code == 1, done.output  # a row has an error
    assert "few-shot 16 × 3 × 4" in done.output
    rows = read_rows(out)[0]
    assert [(row["backend"], row["options"]) for row in rows] == [
        ("right", "--page-size 1"),
        ("crashes", "--page-size 1"),
    ]
    too_long = [*words[:7], "--case", "5000,1,1", "--out", str(out)]
    refused = CliRunner().invoke(app_of(["e2e"]), too_long)
    assert (refused.exit_code, "fake takes 4096" in refused.output) == (2, True)
