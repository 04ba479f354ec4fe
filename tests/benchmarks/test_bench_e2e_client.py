"""The client of token ids against a server with both hosts' endpoints."""

import asyncio

import pytest
from aiohttp import web

from bench_e2e_fakes import (
    FakeHost,
    beam,
    decode,
    first_choice,
    gap_to,
    second_choice,
    third_choice,
)
from benchmarks.token_client.client import Client, ClientError
from benchmarks.token_client.send_requests import SendError, TreeRequest, send_requests
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.workload import Request, Workload

HOSTS = pytest.mark.parametrize("host", ["sglang", "vllm"])
PROMPTS = [[1, 2, 3], [5], [90, 7, 7, 7]]


def with_server(host, use):
    """Run `use` with a client of an in-process server."""

    async def run():
        runner = web.AppRunner(host.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with Client(f"http://127.0.0.1:{port}", host.host) as client:
                return await use(client)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


@HOSTS
def test_a_batch_comes_back_in_the_prompts_order(host):
    answers, seconds = with_server(FakeHost(host), lambda client: client.batch(PROMPTS, 6))
    assert [answer.ids for answer in answers] == [decode(prompt, 6).ids for prompt in PROMPTS]
    assert seconds > 0
    assert not answers[0].logprobs


@HOSTS
def test_log_probabilities_are_of_the_ids(host):
    answers, _ = with_server(
        FakeHost(host, "tie"), lambda client: client.batch(PROMPTS, 6, logprobs=True)
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = decode(prompt, 6, "tie")
        assert answer.logprobs == expected.logprobs
        assert answer.top == expected.top


@HOSTS
def test_how_much_likelier_the_likeliest_token_is(host):
    context = [3, 1, 4]
    for token in (first_choice(context), second_choice(context), third_choice(context)):
        gap = with_server(FakeHost(host), lambda client, token=token: client.gap(context, token))
        assert gap == pytest.approx(gap_to(context, token))


@pytest.mark.parametrize(("host", "incremental"), [("sglang", 0), ("sglang", 1), ("vllm", 1)])
def test_a_stream_gives_each_token_once_with_its_time(host, incremental):
    fake = FakeHost(host, incremental=bool(incremental))
    answer = with_server(fake, lambda client: client.stream([4, 4], 9))
    assert answer.ids == decode([4, 4], 9).ids
    assert len(answer.arrivals) == 9
    assert answer.arrivals == sorted(answer.arrivals)
    assert all(gap >= 0 for gap in answer.gaps)
    assert len(answer.gaps) == 8
    assert answer.cached == (3 if host == "sglang" else None)


@HOSTS
def test_further_fields_are_in_every_request(host):
    fake = FakeHost(host)

    async def ask(client):
        async with Client(client._url, host, {"lora_path": "adapted"}) as other:
            await other.batch(PROMPTS, 2)
            await other.stream([1], 2)
            await other.gap([1], 2)

    with_server(fake, ask)
    assert [body.get("lora_path") for body in fake.bodies] == ["adapted"] * 3


@HOSTS
def test_hanging_up_ends_the_request(host):
    fake = FakeHost(host)

    async def leave(client):
        answer = await client.stream([1], 5000, leave_after=3)
        for _ in range(3000):
            if fake.hung_up:
                break
            await asyncio.sleep(0.01)
        return answer

    answer = with_server(fake, leave)
    assert 3 <= len(answer.ids) < 5000
    assert fake.hung_up == 1


@HOSTS
def test_what_the_server_refuses_is_told(host):
    with pytest.raises(ClientError, match="answered 400: no room"):
        with_server(FakeHost(host, "refuses"), lambda client: client.batch(PROMPTS, 2))


@HOSTS
def test_an_answer_that_is_too_short_is_no_answer(host):
    fake = FakeHost(host, "short")
    with pytest.raises(ClientError, match="3 answers of 5 tokens, got 3 of \\[4\\]"):
        with_server(fake, lambda client: client.batch(PROMPTS, 5))
    with pytest.raises(ClientError, match="ended after 4 of 5 tokens"):
        with_server(fake, lambda client: client.stream([1], 5))


@HOSTS
def test_the_tokens_before_a_cut_are_kept(host):
    kept = Answer()
    with pytest.raises(ClientError, match="ended after 4 of 5 tokens"):
        with_server(FakeHost(host, "short"), lambda client: client.stream([1], 5, into=kept))
    assert kept.ids == decode([1], 5).ids[:4]
    assert len(kept.arrivals) == 4


def send(host, *requests):
    workload = Workload("w", "", (), requests)
    return list(with_server(host, lambda client: send_requests(workload, client)))


@HOSTS
def test_a_request_continues_the_answer_before_it(host):
    first, other, last = send(
        FakeHost(host), Request("a", (1, 2), 5), Request("b", (7,), 3),
        Request("c", (3,), 4, after="a"),
    )  # fmt: skip
    assert [answer.request for answer in (first, other, last)] == ["a", "b", "c"]
    assert other.ids == decode([7], 3).ids
    assert last.ids == decode([1, 2, *decode([1, 2], 5).ids, 3], 4).ids


@HOSTS
def test_a_turn_goes_on_with_what_its_sub_agents_return(host):
    *_, last = send(
        FakeHost(host), Request("a", (1, 2), 3), Request("f", (5,), 2, after="a"),
        Request("g", (6,), 2, after="a"), TreeRequest("r", (3,), 4, after="a", returned=("f", "g")),
    )  # fmt: skip
    start = [1, 2, *decode([1, 2], 3).ids]
    forks = [*decode([*start, 5], 2).ids, *decode([*start, 6], 2).ids]
    assert last.ids == decode([*start, *forks, 3], 4).ids


@HOSTS
def test_beams_come_back_best_first_and_samples_are_sampled(host):
    fake = FakeHost(host)
    *beams, sample = send(
        fake, TreeRequest("b", (1, 2), 4, beams=3), TreeRequest("s", (7,), 5, sampled=True)
    )
    assert [answer.ids for answer in beams] == [beam([1, 2], i, 4).ids for i in range(3)]
    assert [answer.request for answer in beams] == ["b"] * 3
    assert sample.ids == decode([7], 5).ids
    heat = [body.get("sampling_params", body)["temperature"] for body in fake.bodies]
    assert sorted(heat) == [0, 1]


@pytest.mark.parametrize(
    ("mode", "message"), [("short", "w, a: an answer ended after 4"), ("refuses", "w, a: .*400")]
)
def test_a_workload_that_fails_names_the_request(mode, message):
    with pytest.raises(SendError, match=message):
        send(FakeHost(mode=mode), Request("a", (1,), 5))
