"""Requests as token ids, their times with computed clocks, and the check of answers."""

import asyncio
import zlib
from pathlib import Path

import pytest

from bench_e2e_fakes import GAP, MODEL, FakeHost, decode, fake_launch
from benchmarks.e2e import timing
from benchmarks.e2e.answers import check
from benchmarks.e2e.launch import ChoiceError
from benchmarks.e2e.rows import make_row
from benchmarks.e2e.run import client_of
from benchmarks.e2e.workloads import (
    BATCHES,
    TABLE,
    Job,
    Sizes,
    chosen_jobs,
    few_shot,
    longest_request,
    thoughts,
)
from deft_backend.tools.harness.answers import Answer, first_difference
from deft_backend.tools.harness.workload import Request, Workload
from deft_backend.tools.traces.thought_trees import ThoughtTree, lay_out
from drawings import check_drawn
from fake_completions import replayed, serving

IDS = MODEL.ids


def test_a_turn_goes_on_with_what_its_sub_agents_return():
    requests = (
        Request("a", (1, 2), 3),
        Request("b", (9,), 2, after="a"),
        Request("c", (8,), 2, after="a"),
        Request("d", (7,), 1, after="a", returned=("b", "c"), temperature=1.0),
    )
    with serving(FakeHost()) as fake:
        run = replayed(fake, Workload("w", "", ((1,),), requests))
    prompts = {len(body["prompt"]): tuple(body["prompt"]) for body in fake.bodies}
    first = (1, 2, *decode((1, 2), 3).ids)
    back = [decode((*first, own), 2).ids for own in (9, 8)]
    assert prompts[10] == (*first, *back[0], *back[1], 7)
    assert [outcome.answer.request for outcome in run.outcomes] == ["a", "b", "c", "d"]
    assert fake.bodies[-1]["temperature"] == 1.0


def drawn(workload):
    """Each prompt as its length, a digest, and what it shares with the first and the last one."""
    prompts = [request.prompt for request in workload.requests]
    yield " ".join(f"{len(ids)}:{zlib.crc32(bytes(ids)):08x}" for ids in workload.warm)
    for r, ids, before in zip(workload.requests, prompts, [(), *prompts], strict=False):
        shared = first_difference(prompts[0], ids), first_difference(before, ids)
        rest = r.max_tokens, r.after, *r.returned, r.temperature
        yield f"  {r.name}: {len(ids)}:{zlib.crc32(bytes(ids)):08x} {shared} {rest}"


def test_workloads_are_as_drawn():
    """Equal ids on every machine; repeats share only the prefix, and rollouts their lengths."""
    chosen = [name for name in TABLE if name != "draft-trees"], [], None, None, None
    lines = [
        repr((job.name, job.how, *job.sizes, job.gen)) for job in chosen_jobs(*chosen, on_gpu=True)
    ]
    for job in chosen_jobs(*chosen, on_gpu=False):
        for repeat in (1, 2):
            lines += [f"{job.name} {tuple(job.sizes)} {repeat}", *drawn(job.workload(IDS, repeat))]
    lengths = {0: 10, 1: 3, 2: 5, 3: 4, 4: 0, 5: 2}
    children = {0: (1, 2), 1: (3, 4), 2: (), 3: (), 4: (5,), 5: ()}
    tree = thoughts(ThoughtTree("a prompt", lay_out(lengths, children)), Sizes(0, 0, 0), 0, IDS, 1)
    lines += [f"thoughts, the longest {longest_request(tree)}", *drawn(tree)]
    check_drawn("\n".join(lines) + "\n", Path(__file__).with_name("e2e_workloads.txt"))


def test_cases_replace_the_tables_sizes():
    jobs = chosen_jobs(
        ["grid", "rollouts"], ["0,3,8", "rollouts:20,4,2:50"], 7, None, None, on_gpu=True
    )
    assert [(job.name, job.sizes, job.gen) for job in jobs] == [
        ("unshared", (0, 3, 8), 7),
        ("rollouts", (0, 3, 8), 7),
        ("rollouts", (20, 4, 2), 50),
    ]
    with pytest.raises(ChoiceError, match="'soup': expected one of grid"):
        chosen_jobs(["soup"], [], None, None, None, on_gpu=False)


class Clocked:
    """A client without a server; a formula gives its times."""

    def __init__(self, a_token=0.01, before=0.5):
        self.a_token, self.before, self.asked = a_token, before, []

    def seconds(self, prompts, tokens):
        return self.before + self.a_token * (tokens - 1)

    async def batch(self, prompts, tokens, **_):
        return [decode(prompt, tokens) for prompt in prompts]

    async def ask(self, prompt, tokens, **_):
        self.asked.append((tuple(prompt), tokens))
        answer = decode(prompt, tokens)
        answer.arrivals = [self.before + i * self.a_token for i in range(tokens)]
        return answer, None


def timed(client, monkeypatch, sizes=(8, 4, 4), gen=10, host="sglang", repeats=3):
    async def seconds(client, prompts, tokens):
        return client.seconds(prompts, tokens)

    monkeypatch.setattr(timing, "_timed", seconds)
    row = make_row("few-shot", host, "deft", "fake", "")
    job = Job("few-shot", few_shot, BATCHES, Sizes(*sizes), gen, repeats)
    asyncio.run(timing.measure(job, fake_launch(host), client, row))
    return row


def test_time_per_token_leaves_out_what_requests_cost_besides(monkeypatch):
    client = Clocked(a_token=0.02, before=3.0)
    row = timed(client, monkeypatch)
    assert row["tpot_ms"] == pytest.approx(20.0)
    assert row["detail"]["tpot_runs_ms"] == pytest.approx([20.0] * 3)
    assert row["detail"]["tpot_from_tokens"] == 1
    assert row["tokens_per_s"] == pytest.approx(4 * 11 / 3.2, rel=1e-3)
    assert (row["ttft_ms"], row["ttft_p99_ms"]) == (3000.0, 3000.0)
    assert row["itl_p50_ms"] == row["itl_p99_ms"] == pytest.approx(20.0)
    assert row["detail"]["steady_ms"] == pytest.approx(20.0)
    assert {tokens for _, tokens in client.asked} == {11}


@pytest.mark.parametrize("apart", [0.0, 0.03, 0.2])
def test_requests_that_come_one_by_one_are_timed_when_all_decode(monkeypatch, apart):
    class OneByOne(Clocked):
        """A step takes 5 ms, and 2 ms for every request; requests arrive `apart` seconds apart."""

        def seconds(self, prompts, tokens):
            now, left = 0.0, [tokens] * len(prompts)
            while any(left):
                running = [i for i in range(len(left)) if left[i] and i * apart <= now]
                now += 0.005 + 0.002 * len(running) if running else 0.001
                for i in running:
                    left[i] -= 1
            return now

    row = timed(OneByOne(), monkeypatch, (8, 16, 4), 20, "vllm", repeats=1)
    assert row["tpot_ms"] == pytest.approx(5 + 2 * 16, rel=0.02)


def test_steady_time_counts_only_while_all_requests_decode():
    """Steps of 30 ms, three tokens in each; 10 ms while only one request decodes."""
    early = [0.0] * 3 + [0.01] * 3 + [0.02] * 3 + [0.05] * 3 + [0.08] * 3 + [0.11] * 3
    late = [1.02] * 3 + [1.05] * 3 + [1.08] * 3 + [1.11] * 3 + [1.12] * 3 + [1.13] * 3
    answers = [Answer(arrivals=early, sent=5.0), Answer(arrivals=late, sent=4.0)]
    assert timing.steady(answers) == pytest.approx(0.010)
    assert timing.steady([*answers, Answer(arrivals=[0.2], sent=5.0)]) is None  # never all together
    assert timing.steady([*answers, Answer()]) is None


@pytest.mark.parametrize("host", ["sglang", "vllm"])
def test_trees_and_beams_are_replayed(host):
    """Beams are timed by difference, first tokens by kind."""
    launch = fake_launch(host)

    async def run():
        rows = []
        async with client_of(fake.url) as client:
            for name, sizes in (
                ("rollouts", (20, 4, 2)),
                ("agents", (16, 2, 3)),
                ("beams", (8, 3, 1)),
            ):
                row = make_row(name, host, "deft", "fake", "")
                job = Job(name, TABLE[name].make, TABLE[name].how, Sizes(*sizes), 8, 2)
                await timing.measure(job, launch, client, row)
                rows.append(row)
        return rows

    with serving(FakeHost()) as fake:
        first, agents, beams = asyncio.run(run())
    assert first["tpot_ms"] is None
    assert first["detail"]["requests"] == 8
    assert set(agents["detail"]["ttft_by_kind_ms"]) == {"start", "fork", "return"}
    assert agents["tpot_ms"] > 0
    assert len(beams["detail"]["tpot_runs_ms"]) == 2
    assert beams["detail"]["tokens"] == 24


def test_wrong_tokens_are_told_apart_from_ties():
    """Positions divisible by five: 5, 10, 15 of the first context, 5 of the second."""

    async def checked(tolerance, answers):
        asked = ((1, 2, 3, 4), 12), ((9, 9), 7)
        samples = [(prompt, decode(prompt, tokens, answers).ids) for prompt, tokens in asked]
        async with client_of(fake.url) as client:
            return await check(samples, client, tolerance)

    with serving(FakeHost()) as fake:
        right, tie, near, wrong = (
            asyncio.run(checked(*each))
            for each in ((0.0, "right"), (GAP, "tie"), (GAP / 2, "tie"), (10.0, "wrong"))
        )
    assert (right.answers, right.ties, right.wrong) == (2, [], [])
    assert {each.tokens for each in (right, tie, near)} == {19}
    assert tie.ties == pytest.approx([GAP] * 4)
    assert not tie.wrong
    assert len(near.wrong) == 4  # the tokens after a wrong token are also checked
    assert "0.125 less likely" in near.wrong[0]
    assert (len(wrong.wrong), wrong.ties) == (4, [])
    assert "not among the likeliest" in wrong.wrong[0]
