"""`benchmarks start` and first tokens: over servers of our own, whose caches we look into."""

import asyncio
from types import SimpleNamespace

import pytest

from bench_e2e_fakes import FakeClient, FakeLaunch, fake_launch
from benchmarks.e2e.first_tokens import TOKENS, WARM_UPS, FirstTokens
from benchmarks.e2e.start_times import BATCHES, CACHES, start_times


def starts(tmp_path, backends, first="right", host="sglang"):
    return list(
        start_times(
            fake_launch(host), backends, tmp_path / "logs", lambda line: None,
            prefix=16, branches=3, timeout=60.0, first=first,
        )
    )  # fmt: skip


@pytest.mark.parametrize("host", ["sglang", "vllm"])
def test_each_backend_starts_twice(tmp_path, host):
    rows = starts(tmp_path, ["right", "tie"], host=host)
    assert [(row["backend"], row["cache"]) for row in rows] == [
        ("right", "empty"), ("right", "full"), ("tie", "empty"), ("tie", "full"),
    ]  # fmt: skip
    for row in rows:
        assert row["error"] is None
        assert row["seconds"] is not None
        assert row["seconds"] > 0
        assert len(row["batches_ms"]) == BATCHES
        assert (row["host"], row["tp"], row["prefix"], row["branches"]) == (host, 1, 16, 3)
    assert len(list((tmp_path / "logs").iterdir())) == 5  # and the one that does not count


def test_a_backend_finds_the_caches_of_its_first_start(tmp_path, monkeypatch):
    seen = []
    command = FakeLaunch.command

    def record(self, backend):
        seen.append((backend, {name: self.environment[name] for name in CACHES}))
        return command(self, backend)

    monkeypatch.setattr(FakeLaunch, "command", record)
    starts(tmp_path, ["right", "tie"], first="tie")
    (_, uncounted), (_, empty), (_, full), (_, other), (_, again) = seen
    assert empty == full
    assert other == again
    folders = {folder for caches in (uncounted, empty, other) for folder in caches.values()}
    assert len(folders) == 3 * len(CACHES)


def test_a_server_that_does_not_start_is_a_row_with_an_error(tmp_path):
    rows = starts(tmp_path, ["crashes", "right"], first=None)
    assert "the server does not start" in rows[0]["error"]
    assert [row["error"] is None for row in rows] == [False, False, True, True]
    assert rows[0]["seconds"] is None


def test_first_tokens_are_medians_of_new_prompts_behind_one_prefix():
    client = FakeClient(seconds_before=0.25)
    served = SimpleNamespace(launch=fake_launch(), backend="right", client=client)
    row = asyncio.run(FirstTokens(20, 3, 5, repeats=4).run(served, []))
    assert row["ttft_ms"] == row["ttft_p99_ms"] == 250.0
    assert row["detail"]["together_ms"] == 250.0
    assert len(row["detail"]["ttft_runs_ms"]) == len(row["detail"]["together_runs_ms"]) == 4
    prompts = [prompt for prompt, tokens in client.asked if tokens == TOKENS]
    assert len(prompts) == 3 * (WARM_UPS + 4) == len(set(prompts))
    assert len({prompt[:20] for prompt in prompts}) == 1
    assert {len(prompt) for prompt in prompts} == {25}


def test_first_tokens_of_the_slowest_request_and_the_median():
    client = FakeClient()
    times = iter([0.3, 0.1, 0.2] * 20)

    async def stream(prompt, tokens):
        return SimpleNamespace(arrivals=[next(times)])

    client.stream = stream
    served = SimpleNamespace(launch=fake_launch(), backend="right", client=client)
    row = asyncio.run(FirstTokens(20, 3, 5, repeats=3).run(served, []))
    assert (row["ttft_ms"], row["ttft_p99_ms"]) == (200.0, 300.0)
