"""Requests as token ids, their times with computed clocks, and the check of answers."""

import asyncio
import itertools
from contextlib import asynccontextmanager

import pytest
from aiohttp.test_utils import TestServer

from bench_e2e_fakes import GAP, MODEL, FakeHost, decode, fake_launch
from benchmarks.e2e import timing
from benchmarks.e2e.answers import check
from benchmarks.e2e.launch import ChoiceError
from benchmarks.e2e.rows import make_row
from benchmarks.e2e.run import client_of
from benchmarks.e2e.timing import measure, steady
from benchmarks.e2e.workloads import (
    BATCHES,
    TABLE,
    Job,
    Sizes,
    chosen_jobs,
    few_shot,
    longest_request,
    parse_case,
    rollouts,
    thoughts,
)
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.workload import Request, Workload, replay
from deft_backend.tools.traces.thought_trees import ThoughtTree, lay_out

IDS = MODEL.ids


@asynccontextmanager
async def connected(fake, **options):
    """A client of a fake host."""
    async with TestServer(fake.app()) as server:
        url = str(server.make_url("")).rstrip("/")
        async with client_of(url, **options) as client:
            yield client


def asked(fake):
    """The prompts that a fake host got, by answer length."""
    return [(tuple(body["prompt"]), body["max_tokens"]) for body in fake.bodies]


# -- the client of token ids -----------------------------------------------------------------


def test_a_turn_goes_on_with_what_its_sub_agents_return():
    fake = FakeHost()
    requests = (
        Request("a", (1, 2), 3),
        Request("b", (9,), 2, after="a"),
        Request("c", (8,), 2, after="a"),
        Request("d", (7,), 1, after="a", returned=("b", "c"), temperature=1.0),
    )

    async def run():
        async with connected(fake) as client:
            return await replay(Workload("w", "", ((1,),), requests), client)

    run = asyncio.run(run())
    prompts = {len(prompt): prompt for prompt, _ in asked(fake)}
    first = (1, 2, *decode((1, 2), 3).ids)
    back = [decode((*first, own), 2).ids for own in (9, 8)]
    assert prompts[10] == (*first, *back[0], *back[1], 7)
    assert [outcome.answer.request for outcome in run.outcomes] == ["a", "b", "c", "d"]
    assert fake.bodies[-1]["temperature"] == 1.0


# -- the table -------------------------------------------------------------------------------


def prompts(workload):
    return [request.prompt for request in workload.requests]


def common(sequences):
    return sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*sequences)))  # noqa: B905


def test_branches_share_their_prefix_and_nothing_else():
    workload = few_shot(Sizes(64, 8, 16), 4, IDS, 0)
    assert [len(prompt) for prompt in prompts(workload)] == [80] * 8
    assert common(prompts(workload)) in range(64, 68)
    assert workload == few_shot(Sizes(64, 8, 16), 4, IDS, 0)  # another run sends the same
    again = few_shot(Sizes(64, 8, 16), 4, IDS, 1)
    assert again.warm == workload.warm
    assert not set(prompts(again)) & set(prompts(workload))
    unshared = few_shot(Sizes(0, 4, 32), 4, IDS, 0)
    assert unshared.warm == ()
    assert common(prompts(unshared)) < 4


def test_fasttrees_programs_share_what_their_prompts_share():
    """512 questions on four system prompts of three places; eight sets of examples; a vote."""
    job, shots, chain, documents = chosen_jobs(
        ["system-prompts", "shots", "chains", "retrieved"], [], None, None, None, on_gpu=True
    )
    asked = prompts(job.workload(IDS, 1))
    assert [len(asked), len(asked[0])] == [512, 2660]
    shared = [common([asked[0], asked[at]]) for at in (4, 1, 2, 3)]
    assert [at // 5 for at in shared] == [520, 80, 9, 9]  # 2600, 400 and 45 tokens, and by chance
    assert common([asked[2], asked[6]]) >= 2600
    asked = prompts(shots.workload(IDS, 1))
    assert common([asked[0], asked[8]]) >= 6100 > common([asked[0], asked[1]]) >= 2600
    requests = chain.workload(IDS, 1).requests
    assert [len(requests), requests[4].after, len(requests[4].returned)] == [
        160,
        requests[0].name,
        3,
    ]
    assert common(prompts(chain.workload(IDS, 1))[:4]) >= 2660
    warm = documents.workload(IDS, 1).warm
    assert len(warm) == 16
    assert len({ids[at : at + 1100] for ids in warm for at in range(0, 4400, 1100)}) <= 17


def test_rollouts_have_a_long_tail_and_the_same_lengths_in_every_repeat():
    first, second = (rollouts(Sizes(20, 16, 4), 320, IDS, repeat) for repeat in (1, 2))
    lengths = [request.max_tokens for request in first.requests]
    assert lengths == [request.max_tokens for request in second.requests]
    assert max(lengths) == 320 == lengths[0]
    assert min(lengths) >= 20
    assert sorted(lengths)[32] < 120
    assert len(set(prompts(first))) == 4
    assert not set(prompts(first)) & set(prompts(second))
    assert {request.temperature for request in first.requests} == {1.0}


def test_children_go_on_from_their_parents_answer():
    lengths = {0: 10, 1: 3, 2: 5, 3: 4, 4: 0, 5: 2}
    children = {0: (1, 2), 1: (3, 4), 2: (), 3: (), 4: (5,), 5: ()}
    tree = ThoughtTree("a prompt", lay_out(lengths, children))
    workload = thoughts(tree, Sizes(0, 0, 0), 0, IDS, 1)
    by_name = {request.name: request for request in workload.requests}
    assert [request.max_tokens for request in by_name.values()] == [3, 4, 2, 5]
    assert by_name["thought 3"].after == by_name["thought 5"].after == "thought 1"
    assert by_name["thought 1"].prompt[:10] == workload.warm[0]
    assert len({request.prompt[-2:] for request in by_name.values()}) == 4
    assert longest_request(workload) == 10 + 2 + 3 + 2 + 4


def test_cases_replace_the_tables_sizes():
    jobs = chosen_jobs(
        ["grid", "rollouts"], ["0,3,8", "rollouts:20,4,2:50"], 7, None, None, on_gpu=True
    )
    assert [(job.name, job.sizes, job.gen) for job in jobs] == [
        ("unshared", (0, 3, 8), 7),
        ("rollouts", (0, 3, 8), 7),
        ("rollouts", (20, 4, 2), 50),
    ]
    everything = [name for name in TABLE if name != "draft-trees"]
    for on_gpu in (True, False):
        assert chosen_jobs(everything, [], None, None, None, on_gpu=on_gpu)
    with pytest.raises(ChoiceError, match="not PREFIX,BRANCHES,SUFFIX"):
        parse_case("1,0,2")
    for names, cases, said in (
        (["soup"], [], "'soup': expected one of grid"),
        (["grid"], ["chats:1,1,1"], "'chats': expected one of grid"),
        (["trees"], [], "--traces"),
    ):
        with pytest.raises(ChoiceError, match=said):
            chosen_jobs(names, cases, None, None, None, on_gpu=False)


# -- times -----------------------------------------------------------------------------------


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


def timed(client, monkeypatch, sizes=(8, 4, 4), gen=10, host="sglang", how=BATCHES, repeats=3):
    """The row of a job on a clocked client."""

    async def seconds(client, prompts, tokens):
        return client.seconds(prompts, tokens)

    monkeypatch.setattr(timing, "_timed", seconds)
    row = make_row("few-shot", host, "deft", "fake", "")
    job = Job("few-shot", few_shot, how, Sizes(*sizes), gen, repeats)
    asyncio.run(measure(job, fake_launch(host), client, row))
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
    assert steady(answers) == pytest.approx(0.010)
    assert steady([*answers, Answer(arrivals=[0.2], sent=5.0)]) is None  # never all together
    assert steady([*answers, Answer()]) is None


@pytest.mark.parametrize("host", ["sglang", "vllm"])
def test_trees_and_beams_are_replayed(host):
    """Beams are timed by difference, first tokens by kind."""
    fake, launch = FakeHost(), fake_launch(host)

    async def run():
        rows = []
        async with connected(fake) as client:
            for name, sizes in (
                ("rollouts", (20, 4, 2)),
                ("agents", (16, 2, 3)),
                ("beams", (8, 3, 1)),
            ):
                row = make_row(name, host, "deft", "fake", "")
                job = Job(name, TABLE[name].make, TABLE[name].how, Sizes(*sizes), 8, 2)
                await measure(job, launch, client, row)
                rows.append(row)
        return rows

    first, agents, beams = asyncio.run(run())
    assert first["tpot_ms"] is None
    assert first["detail"]["requests"] == 8
    assert set(agents["detail"]["ttft_by_kind_ms"]) == {"start", "fork", "return"}
    assert agents["tpot_ms"] > 0
    assert len(beams["detail"]["tpot_runs_ms"]) == 2
    assert beams["detail"]["tokens"] == 24


# -- answers ---------------------------------------------------------------------------------

SAMPLES = [((1, 2, 3, 4), 12), ((9, 9), 7)]


def checked(tolerance, answers):
    """Check answers of a server with the behaviour `answers` against a right server."""
    samples = [(prompt, decode(prompt, tokens, answers).ids) for prompt, tokens in SAMPLES]

    async def run():
        async with connected(FakeHost()) as client:
            return await check(samples, client, tolerance)

    return asyncio.run(run())


def test_right_answers_are_found_right_to_their_last_token():
    found = checked(0.0, "right")
    assert (found.answers, found.tokens, found.ties, found.wrong) == (2, 19, [], [])


def test_every_tie_is_found_and_what_follows_it_is_looked_at():
    found = checked(GAP, "tie")
    assert found.tokens == 19
    # positions divisible by five: 5, 10, 15 of the first context, 5 of the second
    assert found.ties == pytest.approx([GAP] * 4)
    assert not found.wrong
    wrong = checked(GAP / 2, "tie")
    assert len(wrong.wrong) == 4  # the tokens after a wrong token are also checked
    assert "0.125 less likely" in wrong.wrong[0]
    assert wrong.tokens == 19


def test_a_wrong_token_is_told_apart_from_ties():
    found = checked(10.0, "wrong")
    assert len(found.wrong) == 4
    assert not found.ties
    assert "not among the likeliest" in found.wrong[0]
