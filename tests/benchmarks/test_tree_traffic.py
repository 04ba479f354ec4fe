"""The trees that people grow: their requests, their figures, and the servers that draft."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench_e2e_fakes import MODEL, FakeHost, beam, fake_launch
from benchmarks.e2e.backend_runs import Setup, record
from benchmarks.e2e.backends import HOSTS, Host, Launch
from benchmarks.e2e.choice import BatchChoice, Choice, ModelChoice, Output, ServerChoice
from benchmarks.e2e.drafts import parse_drafts
from benchmarks.e2e.prepare_run import prepared
from benchmarks.e2e.prompt_cases import CaseError
from benchmarks.e2e.serving_bars import bars
from benchmarks.e2e.serving_rows import make_row
from benchmarks.e2e.tree_shapes import Beams, Rollouts, Sessions
from benchmarks.e2e.tree_traffic import Repeat, TreeTraffic, fill
from deft_backend.tools.harness.answers import Answer

SESSIONS = Sessions(prefix=40, branches=2, suffix=4, gen=3, forks=2, turns=2)


def prompts(shape, repeat):
    return [request.prompt for request in shape.workload(MODEL, repeat).requests]


def test_sessions_fork_from_one_history_and_come_back():
    workload = SESSIONS.workload(MODEL, 1)
    (history,) = workload.warm
    starts = [request for request in workload.requests if request.after is None]
    assert [request.prompt[:40] for request in starts] == [history] * 2
    kinds = Counter(request.name.split(", ")[1].split()[0] for request in workload.requests)
    assert kinds == {"start": 2, "fork": 8, "return": 4}
    names = [request.name for request in workload.requests]
    last = workload.requests[names.index("session 1, return 1")]
    assert last.after == "session 1, return 0"
    assert last.returned == ("session 1, fork 1.0", "session 1, fork 1.1")
    assert len(set(prompts(SESSIONS, 1))) == len(names)
    assert not set(prompts(SESSIONS, 1)) & set(prompts(SESSIONS, 2))  # only the history is cached
    assert SESSIONS.workload(MODEL, 2).warm == workload.warm


def test_the_longest_request_of_a_session_is_its_last(tmp_path):
    host = FakeHost()
    served_prompts(host, TreeTraffic(SESSIONS, 1), tmp_path)
    assert max(map(len, host.prompts)) + SESSIONS.gen == SESSIONS.longest


def served_prompts(host, traffic, folder):
    """Run the traffic on a fake server in this process; returns the row."""
    from aiohttp import web

    from benchmarks.e2e.served_workloads import Served
    from benchmarks.token_client.client import Client
    from deft_backend.tools.servers.command import free_port

    async def run():
        runner, port = web.AppRunner(host.app()), free_port()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            async with Client(f"http://127.0.0.1:{port}", host.host) as client:
                launch = replace(fake_launch(host.host), sleeps=True)
                served = Served(launch, "right", "tie", None, client, {}, folder)
                return await traffic.run(served, ())
        finally:
            await runner.cleanup()

    return asyncio.run(run())


@pytest.mark.parametrize("host", ["sglang", "vllm"])
def test_a_server_sleeps_between_rollouts(tmp_path, host):
    fake = FakeHost(host)
    row = served_prompts(fake, TreeTraffic(Rollouts(16, 3, 2, 20), 2), tmp_path)
    assert [path.split("?")[0] for path in fake.slept] == [
        "/release_memory_occupation", "/resume_memory_occupation"] * 2 if host == "sglang" else [
        "/sleep", "/wake_up"] * 2  # fmt: skip
    if host == "vllm":
        assert fake.slept[0] == "/sleep?level=1"
    assert row["detail"]["requests"] == 6
    assert row["detail"]["sleep_and_wake_s"] >= 0
    assert row["tpot_ms"] is None
    sampled = [body for body in fake.bodies if body.get("sampling_params", body)["temperature"]]
    assert len(sampled) == 3 * 6
    assert not list(tmp_path.glob("*.json"))  # sampled answers are not compared


def test_rollouts_have_a_long_tail_and_the_same_lengths_in_every_repeat():
    shape = Rollouts(2000, 64, 4, 8000)
    workload = shape.workload(MODEL, 1)
    lengths = sorted(request.max_tokens for request in workload.requests)
    assert (lengths[-1], len(lengths)) == (8000, 256)
    assert lengths[0] >= 500
    assert lengths[128] < 2500 < lengths[-8]
    assert Counter(prompts(shape, 1)) == dict.fromkeys(workload.warm, 64)
    again = shape.workload(MODEL, 2)
    assert not set(again.warm) & set(workload.warm)  # a trainer's next prompts
    assert lengths == sorted(request.max_tokens for request in again.requests)
    assert max(request.max_tokens for request in shape.workload(MODEL, 0).requests) == 8


def test_beams_are_timed_by_difference():
    row = make_row("beams", "sglang", "deft", "fake", "")
    repeat = Repeat(seconds=1.0, one_token=0.2, answers=[Answer(ids=[1] * 9)] * 4)
    fill(row, Beams(10, 4, 1, 9), [repeat])
    assert row["tpot_ms"] == 100.0
    assert row["tokens_per_s"] == 36.0


def test_time_to_first_token_is_told_by_kind_and_prompts_count_for_rollouts():
    row = make_row("agents", "sglang", "deft", "fake", "")
    answers = [
        Answer(f"session 0, {kind} 0", ids=[1, 2], arrivals=[first, first + 0.5])
        for kind, first in (("start", 3.0), ("fork", 1.0), ("fork", 1.5), ("return", 2.0))
    ]
    fill(row, SESSIONS, [Repeat(warm=9.0, seconds=4.0, answers=answers)])
    assert row["detail"]["ttft_by_kind_ms"] == {"start": 3000.0, "fork": 1000.0, "return": 2000.0}
    assert (row["tpot_ms"], row["tokens_per_s"]) == (500.0, 2.0)
    fill(row, Rollouts(16, 4, 1, 2), [Repeat(warm=12.0, seconds=4.0, answers=answers)])
    assert row["tokens_per_s"] == 0.5


def test_every_shape_leaves_a_row_and_answers_that_are_compared(tmp_path):
    traffic = [
        TreeTraffic(shape, 1)
        for shape in (Beams(12, 3, 1, 6), Rollouts(12, 2, 2, 8), SESSIONS,
                      Sessions(12, 2, 3, 4, forks=0))
    ]  # fmt: skip
    setup = Setup(
        fake_launch(), ("right", "tie"), "tie", traffic, tmp_path / "e.json",
        tmp_path / "logs", "python -m benchmarks e2e", 120.0,
    )  # fmt: skip
    rows = {(row["workload"], row["backend"]): row for row in record(setup, lambda line: None)}
    assert [row["error"] for row in rows.values()] == [None] * 8
    names = ["beams", "rollouts", "agents (2 sub-agents, 3 turns)", "chats (3 turns)"]
    assert [name for name, backend in rows if backend == "right"] == names
    found = rows["beams", "right"]["detail"]["agreement"]
    prompt = traffic[0].shape.workload(MODEL, 1).requests[0].prompt
    equal = sum(beam(prompt, i, 6).ids == beam(prompt, i, 6, "tie").ids for i in range(3))
    assert (found["requests"], found["equal_answers"]) == (3, equal)
    assert equal < 3
    assert "agreement" not in rows["rollouts", "right"]["detail"]
    assert rows["chats (3 turns)", "right"]["ttft_ms"] is not None


def measured(name, backend, sizes, tpot, total):
    row = make_row(name, "sglang", backend, "m", "", prefix=sizes[0], branches=sizes[1], suffix=1)
    row["tpot_ms"] = tpot
    row["detail"] = {"total_s": total, "steps": {"tree": 5}}
    return row


@pytest.mark.parametrize(
    ("name", "sizes", "ours", "found"),
    [
        ("beams", (4096, 128), (5.0, 99.0), [("0.500", True)]),
        ("beams", (4096, 128), (5.1, 1.0), [("0.510", False)]),
        ("beams", (100, 4), (99.0, 10.2), [("1.020", True)]),
        ("rollouts", (2000, 16), (99.0, 10.3), [("1.030", False)]),
        ("chats (3 turns)", (2048, 64), (99.0, 5.0), [("0.500", True)]),
        ("draft-trees", (2000, 8), (9.9, 0.0), [("0.990", True)]),
        ("draft-trees", (2000, 32), (10.0, 0.0), [("1.000", False)]),
        ("draft-trees", (2000, 1), (99.0, 0.0), []),
    ],
)
def test_each_tree_has_a_bar_of_its_own(name, sizes, ours, found):
    rows = [measured(name, "deft", sizes, *ours), measured(name, "fa3", sizes, 10.0, 10.0)]
    assert [(bar.found, bar.met) for bar in bars(rows)] == found
    rows[0]["error"] = "it ended"
    assert all(bar.met is False for bar in bars(rows))


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(Host, "on_gpu", lambda self: True)
    monkeypatch.setattr("benchmarks.e2e.prepare_run.checked_backends", lambda host, names: names)
    monkeypatch.setattr("benchmarks.e2e.prepare_run.num_gpus", lambda: 1)


def choice(tmp_path, *names, drafts=None, host="sglang", **batches):
    return Choice(
        Output(tmp_path / "e.json"), names, ServerChoice(host, drafts=drafts),
        ModelChoice(shape="llama-3.1-8b", weights="dummy"), BatchChoice(**batches),
    )  # fmt: skip


@pytest.mark.usefixtures("on_gpu")
def test_a_server_drafts_with_a_model_that_the_command_writes(tmp_path):
    with prepared(choice(tmp_path, "draft-trees", drafts="eagle,60,3")) as setup:
        arguments = setup.launch.command("deft", tmp_path).arguments
        environment = setup.launch.command("deft", tmp_path).environment
        folder = Path(arguments[arguments.index("--speculative-draft-model-path") + 1])
        config = json.loads((folder / "config.json").read_text())
        rows = [workload.row(setup.launch, "deft") for workload in setup.workloads]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (1, 4096)
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert arguments[arguments.index("--speculative-num-draft-tokens") + 1] == "60"
    assert environment["SGLANG_SIMULATE_ACC_LEN"] == "3"
    assert environment["DEFT_FALLBACK_BACKEND"] == "fa3"  # prefill and draft layers
    assert {row["options"] for row in rows} == {"(drafts eagle,60,3)"}
    assert {(row["workload"], row["branches"]) for row in rows} == {
        ("draft-trees", requests) for requests in (1, 8, 32)
    }


def test_chains_of_both_hosts(tmp_path):
    chain = parse_drafts("ngram,5,2.5")
    sglang = chain.options("sglang", {}, tmp_path)
    assert sglang[-2:] == ["--speculative-ngram-max-bfs-breadth", "1"]
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "5"
    config = json.loads(chain.options("vllm", {}, tmp_path)[1])
    assert config["num_speculative_tokens"] == 4
    assert config["synthetic_acceptance_length"] == 2.5
    assert (chain.topk, chain.steps) == (1, 4)
    assert not list(tmp_path.iterdir())
    own = parse_drafts("mtp,5,2").options("sglang", {}, tmp_path)
    assert own[:4] == ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "4"]


@pytest.mark.usefixtures("on_gpu")
def test_a_case_may_be_of_one_workload_and_have_its_own_tokens(tmp_path):
    cases = ["beams:64,4,1:9", "512,8,2"]
    with prepared(choice(tmp_path, "beams", "chats", cases=cases, gen=20)) as setup:
        found = [(t.shape.name, t.shape.prefix, t.shape.gen) for t in setup.workloads]
    assert found == [("beams", 64, 9), ("beams", 512, 20), ("chats (3 turns)", 512, 20)]
    with pytest.raises(CaseError, match="names the workload agents"):
        prepared(choice(tmp_path, "beams", cases=["agents:64,4,1"])).__enter__()
    for text in ("beams:64,4", "64,4,1:0", "64,4,1:", "a:b:c"):
        with pytest.raises(CaseError, match="PREFIX,BRANCHES,SUFFIX"):
            prepared(choice(tmp_path, "beams", cases=[text])).__enter__()


@pytest.mark.usefixtures("on_gpu")
def test_rollouts_need_a_server_that_can_sleep(tmp_path):
    with prepared(choice(tmp_path, "beams", "rollouts", cases=["64,4,1"], gen=32)) as setup:
        assert setup.launch.label == "(sleeps)"
        assert "--enable-memory-saver" in setup.launch.command("deft", tmp_path).arguments
        assert [workload.row(setup.launch, "deft")["gen"] for workload in setup.workloads] == [
            32
        ] * 2
    asleep = Launch(HOSTS["vllm"], MODEL, sleeps=True).command("host", tmp_path)
    assert "--enable-sleep-mode" in asleep.arguments
    assert asleep.environment["VLLM_SERVER_DEV_MODE"] == "1"
