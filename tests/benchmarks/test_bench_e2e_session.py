"""Whole end-to-end runs with our own servers, the hosts' clients' figures, and the command."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bench_e2e_fakes import GAP, MODEL, fake_launch
from benchmarks.__main__ import app
from benchmarks.e2e.backend_runs import Recorder, Setup, record, record_together
from benchmarks.e2e.backends import Host
from benchmarks.e2e.choice import Choice, ChoiceError, ModelChoice, Output, ServerChoice
from benchmarks.e2e.host_clients import HostClient, HostClientError, fill
from benchmarks.e2e.mixed_traffic import Traffic
from benchmarks.e2e.prepare_run import prepared
from benchmarks.e2e.prompt_cases import GRID as GRID_SIZES
from benchmarks.e2e.prompt_cases import grid_case
from benchmarks.e2e.random_weights import write_weights
from benchmarks.e2e.served_model import SHAPES, ModelError, write_model
from benchmarks.e2e.served_workloads import Mixed, Together
from benchmarks.e2e.serving_rows import by_case, make_row, read_rows
from benchmarks.row_files import RowsError, write_rows
from deft_backend.settings import version as distributions
from deft_backend.tools.servers import command as launch
from deft_backend.tools.servers.process import ServerProcess

GRID = Together(grid_case(MODEL, 16, 3, 4), 6, 1)


@pytest.fixture(autouse=True)
def one_commit(monkeypatch):
    """An edit of the checkout during the tests must not count as another build."""
    monkeypatch.setenv("GIT_COMMIT", "abc")


def run(tmp_path, backends, workloads, host="sglang", policy=None, together=False):
    said = []
    setup = Setup(
        replace(fake_launch(host), policy=policy), backends, "tie", workloads,
        tmp_path / "e.json", tmp_path / "logs",
        "python -m benchmarks e2e", 120.0,
    )  # fmt: skip
    rows = record_together([setup], said.append) if together else record(setup, said.append)
    assert read_rows(setup.out)[0] == rows
    return {(row["workload"], row["backend"]): row for row in rows}, said


@pytest.mark.parametrize(("host", "together"), [
    ("sglang", False), ("vllm", False), ("sglang", True),
])  # fmt: skip
def test_every_backend_gets_a_row_and_answers_are_compared(tmp_path, host, together):
    rows, said = run(tmp_path, ("tie", "right"), [GRID], host, together=together)
    assert [backend for _, backend in rows] == ["right", "tie"]  # ours first
    for row in rows.values():
        assert row["error"] is None
        assert None not in (row["ttft_ms"], row["itl_p99_ms"], row["tokens_per_s"])
        assert len(row["detail"]["tpot_runs_ms"]) == 1
        assert (row["prefix"], row["branches"], row["suffix"], row["gen"]) == (16, 3, 4, 6)
    found = rows["few-shot", "right"]["detail"]["agreement"]
    assert found["against"] == "tie"
    assert found["requests"] == 3
    assert found["equal_answers"] == 0
    assert "agreement" not in rows["few-shot", "tie"]["detail"]
    assert any("few-shot" in line for line in said)


@pytest.mark.parametrize("together", [False, True])
def test_what_a_server_does_not_do_is_a_row_with_an_error(tmp_path, together):
    other = Together(grid_case(MODEL, 0, 2, 4), 4, 1)
    backends = ("right", "crashes", "dies", "tie")
    rows, said = run(tmp_path, backends, [GRID, other], together=together)
    if together:  # in turn, and nobody is always first
        done = [line.split(":")[0] for line in said if "TTFT ms" in line]
        assert done == ["right", "tie", "tie", "right"]
    assert len(rows) == 8
    for workload in ("few-shot", "unshared"):
        assert "StartError" in rows[workload, "crashes"]["error"]
        assert "the server does not start" in rows[workload, "crashes"]["error"]
        assert "ended with exit code" in rows[workload, "dies"]["error"]
        assert rows[workload, "right"]["error"] is rows[workload, "tie"]["error"] is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backends", [("right", "hangs"), ("hangs", "tie")])
def test_an_interrupt_does_not_wait_for_servers_that_start(tmp_path, backends):
    def interrupt(line):
        if "ready after" in line:
            raise KeyboardInterrupt

    setup = Setup(
        fake_launch("sglang"), backends, "tie", [GRID], tmp_path / "e.json",
        tmp_path / "logs", "", 500.0,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        record_together([setup], interrupt)


def test_answers_without_a_server_are_not_checked_together(tmp_path):
    done = CliRunner().invoke(app, [
        "e2e", "--together", "--backends", "deft,pytorch", "--out", str(tmp_path / "e.json"),
    ])  # fmt: skip
    assert done.exit_code == 2
    assert "leave --together out" in done.output


@pytest.mark.parametrize("together", [False, True])
def test_a_server_that_hangs_is_given_up(tmp_path, monkeypatch, together):
    """It has ended before the rows say so: others on its GPU must not wait for its requests."""
    slow = Together(grid_case(MODEL, 16, 3, 4), 6, 1, seconds=0.0)
    other = Together(grid_case(MODEL, 0, 1, 4), 2, 1)
    happened = []
    put, stop = Recorder.put, ServerProcess.stop
    monkeypatch.setattr(Recorder, "put", lambda *args: happened.append("row") or put(*args))
    monkeypatch.setattr(ServerProcess, "stop", lambda self: happened.append("stop") or stop(self))
    rows, _ = run(tmp_path, ("right", "tie"), [slow, other], together=together)
    assert happened[:2] == ["stop", "row"]
    for row in rows.values():
        assert row["error"].startswith("ServerHung: few-shot 16 × 3 × 4 did not end")


def test_runs_add_to_the_same_file(tmp_path, monkeypatch):
    first, _ = run(tmp_path, ("right",), [GRID])
    assert "agreement" not in first["few-shot", "right"]["detail"]
    both, _ = run(tmp_path, ("tie",), [GRID])
    assert set(both) == {("few-shot", "right"), ("few-shot", "tie")}
    # The reference ran later; the first server's answers were kept.
    assert both["few-shot", "right"]["detail"]["agreement"]["against"] == "tie"
    header = read_rows(tmp_path / "e.json")[1]
    assert [entry["backends"] for entry in header["runs"]] == [["right"], ["tie"]]
    # A policy is another side of the same case; the reference has none.
    _, said = run(tmp_path, ("right",), [GRID], policy="fasttree")
    assert any(line.startswith("right, fasttree: few-shot") for line in said)
    rows, header = read_rows(tmp_path / "e.json")
    (sides,) = by_case(rows).values()
    assert sides.keys() == {"right", "tie", "right, fasttree"}
    assert sides["right, fasttree"]["detail"]["agreement"]["against"] == "tie"
    assert header["runs"][-1]["policy"] == "fasttree"
    monkeypatch.setenv("GIT_COMMIT", "def")
    with pytest.raises(RowsError, match="commit"):
        run(tmp_path, ("tie",), [GRID])


TRAFFIC = Traffic(
    0.02, workers=3, documents=2, document_tokens=12, most_question_tokens=4,
    most_answer_tokens=9, aborted=0.0, samples=5,
)  # fmt: skip


def test_traffic_is_checked_against_the_reference(tmp_path):
    rows, said = run(tmp_path, ("tie", "right"), [Mixed(TRAFFIC, GAP)])
    assert not any("not checked" in line for line in said)
    (row,) = rows.values()
    assert row["backend"] == "right"
    assert row["error"] is None
    checked = row["detail"]["checked"]
    # The reference's own second choice is less likely than ours, so ours is no tie.
    assert checked["answers"] == min(5, row["detail"]["traffic"]["finished"])
    assert checked["tokens"] > 0
    assert checked["against"] == "tie"
    assert checked["wrong"] == 0
    assert row["detail"]["traffic"]["finished"] >= TRAFFIC.workers
    assert len(row["detail"]["memory"]) >= 2
    assert row["detail"]["memory"][0]["rss_mib"] > 0


@pytest.mark.parametrize("together", [False, True])
def test_traffic_without_the_reference_says_what_checks_it(tmp_path, together):
    part = replace(TRAFFIC, part=3)
    options = "--backends tie --workloads traffic --minutes 0.02 --part 3"
    rows, said = run(tmp_path, ("right",), [Mixed(part, GAP)], together=together)
    assert f"not checked yet; run the same command with {options}, into the same --out" in said[-1]
    (row,) = rows.values()
    assert row["detail"]["check_with"] == options
    _, said = run(tmp_path, ("right",), [GRID])  # it belongs to another run
    assert not any("not checked" in line for line in said)
    rows, said = run(tmp_path, ("tie",), [Mixed(part, GAP)])
    assert not any("not checked" in line for line in said)
    detail = rows["mixed-traffic part 3", "right"]["detail"]
    assert detail["checked"]["against"] == "tie"
    assert "check_with" not in detail


def test_traffic_of_a_wrong_server_is_found_wrong(tmp_path):
    launch = fake_launch()
    object.__setattr__(launch.host, "backends", ("wrong", "right"))
    setup = Setup(
        launch, ("wrong", "right"), "right", [Mixed(TRAFFIC, GAP)], tmp_path / "e.json",
        tmp_path / "logs", "", 120.0,
    )  # fmt: skip
    (row,) = record(setup, lambda line: None)
    assert row["detail"]["checked"]["wrong"] > 0


def test_without_recorded_answers_there_is_nothing_to_check(tmp_path):
    rows, _ = run(tmp_path, ("tie",), [Mixed(TRAFFIC, GAP)])
    (row,) = rows.values()
    assert "no answers of right to check" in row["error"]


# -- the hosts' clients ----------------------------------------------------------------------

FIGURES = {
    "completed": 12, "failed": 0, "median_tpot_ms": 4.5, "median_ttft_ms": 51.7,
    "p99_ttft_ms": 60.0, "median_itl_ms": 4.4, "p99_itl_ms": 9.0, "output_throughput": 1023.9,
    "duration": 0.5, "mean_ttft_ms": 52.0, "request_throughput": 24.0,
    "total_input_tokens": 1632, "total_output_tokens": 96,
}  # fmt: skip


def client_row():
    return make_row("generated-shared-prefix:tiny", "sglang", "deft", "fake", "")


def test_the_median_of_a_clients_runs_counts():
    row = client_row()
    runs = [{**FIGURES, "median_ttft_ms": t, "output_throughput": 1e3 * t} for t in (5.0, 1.0, 2.0)]
    fill(row, runs)
    assert (row["ttft_ms"], row["tokens_per_s"]) == (2.0, 2000.0)
    assert row["detail"]["ttft_runs_ms"] == [5.0, 1.0, 2.0]
    with pytest.raises(HostClientError, match="figures without"):
        fill(client_row(), [*runs, {**FIGURES, "median_tpot_ms": None}])


@pytest.mark.parametrize(
    ("figures", "message"),
    [({"failed": 2}, "2 failed"), ({"completed": 11}, "11 requests were answered"),
     ({"completed": None}, "figures without"), ({"completed": 0}, "0 requests")],
)  # fmt: skip
def test_a_client_with_failed_requests_shows_its_output(tmp_path, monkeypatch, figures, message):
    output = "Error 0: Not Found\n" + 40 * f"{'figure':60}\n" + "nanobind: leaked\n" + 5000 * "-"
    script = f"import sys; open(sys.argv[1], 'w').write({json.dumps(FIGURES | figures)!r})"
    monkeypatch.setattr(
        HostClient, "command",
        lambda self, url, model, out: [sys.executable, "-c", f"{script}; print({output!r})", out],
    )  # fmt: skip
    with pytest.raises(HostClientError, match=message) as raised:
        asyncio.run(HostClient("vllm", "tiny").run("http://x", MODEL, {}, tmp_path))
    assert "Error 0: Not Found" in str(raised.value)
    assert "nanobind" not in str(raised.value)


# -- the model -------------------------------------------------------------------------------


def test_the_tokenizer_gives_back_the_ids_that_it_decoded(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = write_model(tmp_path, "tiny", "dummy", "float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 1024
    ids = [0, 5, 1021, 77, 77, 300]
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert tokenizer.encode(f"{tokenizer.decode(ids)}\n\n{tokenizer.decode(ids)}") == ids + ids
    assert (model.load_format, model.ids, model.context) == ("dummy", 1022, 16384)
    assert not list(tmp_path.glob("*.safetensors"))


def test_another_process_writes_what_this_one_would(tmp_path):
    write_model(tmp_path, "tiny", "random", "float32", seed=7)
    names = ["head.safetensors", "layer-00.safetensors", "layer-01.safetensors"]
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == names
    files = [tmp_path / name for name in (*names, "model.safetensors.index.json")]
    written = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
    write_weights(tmp_path, 7)
    assert [file.read_bytes() for file in files] == written


def test_a_drafter_repeats_the_first_layer(tmp_path):
    """Behind it, hosts find the embedding and the head, and a projection of the token alone."""
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES["latent-8-drafting"], **small}))
    write_weights(tmp_path, 7)
    found = {}
    for file in tmp_path.glob("*.safetensors"):
        found.update(load_file(file))
    first, drafter = "model.layers.0.", "model.layers.4."
    for name, weight in found.items():
        if name.startswith(first):
            assert found[name.replace(first, drafter)].equal(weight)
    assert found[drafter + "embed_tokens.weight"].equal(found["model.embed_tokens.weight"])
    assert found[drafter + "shared_head.head.weight"].equal(found["lm_head.weight"])
    projected = found[drafter + "eh_proj.weight"] @ torch.arange(128).bfloat16()
    assert projected.tolist() == list(range(64))
    added = [found[f"model.layers.{layer}.mlp.down_proj.weight"].std() for layer in range(4)]
    assert all(later < 0.3 * added[0] for later in added[1:])


# -- the command -----------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """Make both hosts appear installed, in versions that tree attention accepts."""
    monkeypatch.setenv("DEFT_UNTESTED_HOST", "1")
    monkeypatch.setattr("benchmarks.e2e.backends.find_spec", lambda name: object())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"servers": ServerChoice("tgi")}, "the host is 'tgi'; expected one of sglang, vllm"),
        (
            {"workloads": ["scheduler", "grid"], "model": ModelChoice(weights="dummy")},
            "run it by itself",
        ),
        ({"workloads": ["traffic"]}, "dummy weights"),
        ({"servers": ServerChoice(tensor_parallel=3)}, "a divisor of the 4 query heads"),
        ({"servers": ServerChoice(options=("--tp-size=2",))}, "--tp-size=2 is among"),
        ({"servers": ServerChoice(backends=("triton",), policy="auto")}, "for the backend deft"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_before_a_server(tmp_path, choice, message):
    asked = {"model": ModelChoice(shape="tiny", weights="dummy"), **choice}
    with (
        pytest.raises(ChoiceError, match=message.replace("(", "\\(")),
        prepared(Choice(Output(tmp_path / "e.json"), **asked)),
    ):
        pytest.fail("it was let through")


@pytest.mark.usefixtures("installed")
def test_a_checkpoint_that_was_not_finished_is_written_again(tmp_path):
    choice = Choice(
        Output(tmp_path / "e.json"),
        model=ModelChoice(shape="tiny", checkpoint=tmp_path / "kept"),
    )
    folder = tmp_path / "kept" / "tiny-random"
    in_the_way = folder / "layer-01.safetensors"
    in_the_way.mkdir(parents=True)
    with pytest.raises(ModelError, match=r"(?s)ended with 1: .*Is a directory"), prepared(choice):
        pytest.fail("it was let through")
    assert (folder / "layer-00.safetensors").is_file()
    assert not (folder / "complete").exists()
    in_the_way.rmdir()
    with prepared(choice):
        assert in_the_way.is_file()
        assert (folder / "complete").is_file()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("host", "reference", "set_by_user", "expected"),
    [
        ("sglang", "triton", None, "triton"),
        ("sglang", "triton", "flashinfer", None),  # the user's setting reaches the server anyway
        ("vllm", "FLASHINFER", None, None),
    ],
)
def test_the_server_with_the_plugin_prefills_as_the_named_reference(
    tmp_path, monkeypatch, host, reference, set_by_user, expected
):
    monkeypatch.delenv("DEFT_FALLBACK_BACKEND", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("DEFT_FALLBACK_BACKEND", set_by_user)
    choice = Choice(
        Output(tmp_path / "e.json"), ("grid",),
        ServerChoice(host, None, reference, policy="fasttree"),
        ModelChoice(shape="tiny", weights="dummy"),
    )  # fmt: skip
    with prepared(choice) as setup:
        command = setup.launch.command(setup.launch.host.ours, tmp_path)
        other = setup.launch.command(setup.launch.host.defaults()[1], tmp_path)
    assert command.environment.get("DEFT_FALLBACK_BACKEND") == expected
    assert command.environment["DEFT_POLICY"] == "fasttree"
    assert "DEFT_POLICY" not in other.environment


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "expected"),
    [((), None), (("--kv-cache-dtype", "fp8_e4m3"), "fa3")],
)
def test_prompts_that_plain_pytorch_checks_are_fa3s_if_the_cache_has_8_bits(
    tmp_path, monkeypatch, options, expected
):
    monkeypatch.delenv("DEFT_FALLBACK_BACKEND", raising=False)
    monkeypatch.setattr(Host, "on_gpu", lambda self: True)
    monkeypatch.setattr("benchmarks.e2e.served_model._write_weights", lambda *_: None)
    servers = ServerChoice("sglang", None, "pytorch", options)
    model = ModelChoice(shape="one-layer", weights="random")
    with prepared(Choice(Output(tmp_path / "e.json"), ("traffic",), servers, model)) as setup:
        command = setup.launch.command(setup.launch.host.ours, tmp_path)
    assert command.environment.get("DEFT_FALLBACK_BACKEND") == expected
    grid = Choice(Output(tmp_path / "e.json"), ("grid",), servers, model)
    with pytest.raises(ChoiceError, match="checks the workload traffic alone"), prepared(grid):
        pass
    own = Choice(Output(tmp_path / "e.json"), ("traffic",), servers, ModelChoice(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "max_position_embeddings": 9}')
    with pytest.raises(ChoiceError, match="knows only the models that this command writes"):
        prepared(own).__enter__()


def test_a_part_of_a_hybrid_keeps_its_first_layers(tmp_path):
    write_model(tmp_path, "qwen3.5-9b", "dummy", "bfloat16", layers=8)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["layer_types"] == [*["linear_attention"] * 3, "full_attention"] * 2


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("host", ["sglang", "vllm"])
def test_servers_on_several_gpus(tmp_path, monkeypatch, host):
    """Rows say how many GPUs and layers there were; more ranks than GPUs are refused."""
    monkeypatch.setattr(Host, "on_gpu", lambda self: True)
    monkeypatch.setattr("benchmarks.e2e.prepare_run.num_gpus", lambda: 2)
    choice = Choice(
        Output(tmp_path / "e.json"), ("grid", "documents"), ServerChoice(host, tensor_parallel=2),
        ModelChoice(shape="llama-3.1-70b", weights="dummy", layers=16),
    )  # fmt: skip
    with prepared(choice) as setup:
        config = json.loads((Path(setup.launch.model.path) / "config.json").read_text())
        arguments = setup.launch.command("fa3", tmp_path).arguments
        rows = [workload.row(setup.launch, "fa3") for workload in setup.workloads]
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    assert (*heads, config["num_hidden_layers"]) == (64, 8, 16)
    assert arguments[arguments.index("--tensor-parallel-size") + 1] == "2"
    names = {(row["model"], row["tp"]) for row in rows}
    assert names == {("llama-3.1-70b, 16 of 80 layers, dummy weights, bfloat16", 2)}
    more = replace(choice, servers=ServerChoice(host, tensor_parallel=4))
    with pytest.raises(ChoiceError, match="--tp is 4, but this machine has 2 GPUs"), prepared(more):
        pytest.fail("it was let through")


@pytest.mark.usefixtures("installed")
def test_on_a_gpu_the_default_is_the_published_grid(tmp_path, monkeypatch):
    monkeypatch.setattr(Host, "on_gpu", lambda self: True)
    choice = Choice(Output(tmp_path / "e.json"), model=ModelChoice(weights="dummy"))
    with prepared(choice) as setup:
        assert setup.backends == ("deft", "fa3", "flashinfer", "triton")
        assert setup.reference == "fa3"
        assert setup.launch.model.name == "llama-3.1-8b, dummy weights, bfloat16"
        found = [(w.case.prefix, w.case.branches, w.case.suffix) for w in setup.workloads]
        assert found == list(GRID_SIZES)
        assert [w.repeats for w in setup.workloads] == [7, 7, 7, 3, 3, 3]
    with prepared(replace(choice, servers=ServerChoice("vllm"))) as setup:
        assert setup.backends == ("CUSTOM", "FLASH_ATTN", "FLASHINFER")
        assert setup.reference == "FLASH_ATTN"


def test_the_command_measures_shows_and_draws(tmp_path, monkeypatch):
    out = tmp_path / "e.json"
    setup = Setup(
        fake_launch(), ("right", "crashes"), "tie", [GRID], out, tmp_path / "logs", "", 120.0
    )
    asked = []

    class Prepared:
        def __init__(self, choice):
            asked.append(choice)

        def __enter__(self):
            return setup

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("benchmarks.e2e.prepare_run.prepared", Prepared)
    command = [
        "e2e", "--backends", "deft, fa3", "--case", "0,1,8", "--out", str(out),
        "--", "--page-size", "16",
    ]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1, done.output  # a row has an error
    assert asked[0].servers.backends == ["deft", "fa3"]
    assert asked[0].batches.cases == ["0,1,8"]
    assert asked[0].servers.options == ("--page-size", "16")
    assert "few-shot 16 × 3 × 4" in done.output
    rows, header = read_rows(out)
    rows[0]["tpot_ms"] = 1.5  # our test server has no meaningful speed
    write_rows(out, rows, header)
    merged = tmp_path / "m.json"
    done = CliRunner().invoke(app, ["e2e-merge", str(out), str(out), "--out", str(merged)])
    assert done.exit_code == 0, done.output
    assert len(read_rows(merged)[0]) == 2
    assert (tmp_path / "m.svg").is_file()
    done = CliRunner().invoke(app, ["e2e-merge", str(tmp_path / "none.json")])
    assert done.exit_code == 2
    done = CliRunner().invoke(app, ["e2e-merge", str(out), str(out)])
    assert (done.exit_code, "name it with --out" in done.output) == (2, True)


@pytest.mark.usefixtures("installed")
def test_a_host_that_decodes_by_itself_is_not_measured(monkeypatch):
    monkeypatch.delenv("DEFT_UNTESTED_HOST")
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    monkeypatch.setattr(distributions, "version", lambda name: "0.5.1")
    done = CliRunner().invoke(app, ["e2e", "--host", "sglang"])
    assert done.exit_code == 2
    assert (
        "decodes without tree attention: tree attention was tested with SGLang >=0.5.17"
        in done.stderr
    )
