"""The requests and measurements of an end-to-end run, with a client whose times are computed."""

import asyncio
import itertools

import pytest

from bench_e2e_fakes import GAP, MODEL, FakeClient, decode, third_choice
from benchmarks.e2e import checked_answers, tree_replay
from benchmarks.e2e.batch_timing import measure, steady
from benchmarks.e2e.checked_answers import check
from benchmarks.e2e.kept_answers import compare
from benchmarks.e2e.memory import growth
from benchmarks.e2e.mixed_traffic import Traffic, drive
from benchmarks.e2e.prompt_cases import CaseError, Documents, check_fits, grid_case, percentile
from benchmarks.e2e.serving_rows import make_row
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.traces.recorded_trees import ThoughtTree, lay_out


def row_of(name="few-shot"):
    return make_row(name, "sglang", "deft", "fake", "")


def common_prefix(prompts):
    return sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts)))  # noqa: B905


def test_branches_share_their_prefix_and_nothing_else():
    case = grid_case(MODEL, 64, 8, 16)
    assert [len(prompt) for prompt in case.prompts] == [80] * 8
    assert common_prefix(case.prompts) in range(64, 68)
    assert len(set(case.prompts)) == 8
    assert case == grid_case(MODEL, 64, 8, 16)  # another run sends the same
    assert case.warm[0][:64] == case.prompts[3][:64]
    unshared = grid_case(MODEL, 0, 4, 32)
    assert (unshared.workload, unshared.warm) == ("unshared", ())
    assert common_prefix(unshared.prompts) < 4
    assert all(0 <= id < MODEL.ids for prompt in case.prompts for id in prompt)


def test_documents_are_mixed_with_loners():
    sizes = Documents(
        documents=3, tokens=50, questions=4, question_tokens=5, loners=6, loner_tokens=20
    )
    case = sizes.case(MODEL)
    by_document = [[p for p in case.prompts if p[:50] == text] for text in case.warm]
    assert [len(found) for found in by_document] == [4, 4, 4]
    assert sum(len(prompt) == 20 for prompt in case.prompts) == 6
    of = [next((i for i, t in enumerate(case.warm) if p[:50] == t), 3) for p in case.prompts]
    assert of != sorted(of)


def test_a_case_must_fit_the_context():
    case = grid_case(MODEL, 4000, 1, 90)
    check_fits(case, 6, MODEL)
    with pytest.raises(CaseError, match="4090 tokens and answers of 7"):
        check_fits(case, 7, MODEL)


def test_time_per_token_leaves_out_what_requests_cost_besides():
    row = row_of()
    client = FakeClient(seconds_a_token=0.02, seconds_before=3.0)
    asyncio.run(measure(grid_case(MODEL, 8, 4, 4), 10, 3, client, row))
    assert row["tpot_ms"] == pytest.approx(20.0)
    assert row["detail"]["tpot_runs_ms"] == pytest.approx([20.0] * 3)
    assert row["detail"]["tpot_from_tokens"] == 1
    assert row["tokens_per_s"] == pytest.approx(4 * 11 / 3.2, rel=1e-3)
    assert (row["ttft_ms"], row["ttft_p99_ms"]) == (3000.0, 3000.0)
    assert row["itl_p50_ms"] == pytest.approx(20.0)
    assert row["itl_p99_ms"] == pytest.approx(20.0)
    assert row["detail"]["steady_ms"] == pytest.approx(20.0)
    assert {tokens for _, tokens in client.asked} == {11}


def test_steady_time_counts_only_while_all_requests_decode():
    """Steps of 30 ms, three tokens in each; 10 ms while only one request decodes."""
    early = [0.0] * 3 + [0.01] * 3 + [0.02] * 3 + [0.05] * 3 + [0.08] * 3 + [0.11] * 3
    late = [1.02] * 3 + [1.05] * 3 + [1.08] * 3 + [1.11] * 3 + [1.12] * 3 + [1.13] * 3
    answers = [Answer(arrivals=early, sent=5.0), Answer(arrivals=late, sent=4.0)]
    assert steady(answers) == pytest.approx(0.010)
    assert steady([*answers, Answer(arrivals=[0.2], sent=5.0)]) is None  # never all together
    assert steady([*answers, Answer()]) is None


def test_a_kernel_that_the_host_compiles_for_streams_does_not_count():
    class Compiles(FakeClient):
        """The first stream of each prompt waits for a second."""

        async def stream(self, prompt, tokens, **options):
            first = tuple(prompt) not in {asked for asked, _ in self.asked}
            answer = await super().stream(prompt, tokens, **options)
            answer.arrivals = [arrival + first for arrival in answer.arrivals]
            return answer

    row = row_of()
    asyncio.run(measure(grid_case(MODEL, 8, 4, 4), 10, 1, Compiles(0.02, 3.0), row))
    assert (row["ttft_ms"], row["ttft_p99_ms"]) == (3000.0, 3000.0)


def test_a_short_batch_that_waited_does_not_count():
    class Waits(FakeClient):
        """For some batches the server is busy for a second."""

        waited = itertools.cycle([0.0, 1.0, 0.0, 0.0])  # the first is the one before all others

        async def batch(self, prompts, tokens, *, logprobs=False):
            answers, seconds = await super().batch(prompts, tokens, logprobs=logprobs)
            return answers, seconds + (next(self.waited) if tokens == 1 else 0.0)

    row = row_of()
    asyncio.run(measure(grid_case(MODEL, 8, 4, 4), 10, 1, Waits(0.02, 3.0), row))
    assert row["tpot_ms"] == pytest.approx(20.0)


def test_the_fastest_of_the_batches_count_where_that_is_asked_for():
    class Slower(FakeClient):
        """Batches of long answers get slower and slower, batches of short ones faster."""

        turn = 0

        async def batch(self, prompts, tokens, *, logprobs=False):
            answers, seconds = await super().batch(prompts, tokens, logprobs=logprobs)
            self.turn += 1
            return answers, seconds + (0.01 if tokens > 1 else -0.01) * self.turn

    found = []
    for fastest in (False, True):
        row = row_of()
        case = grid_case(MODEL, 8, 4, 4)
        asyncio.run(measure(case, 10, 3, Slower(0.02, 3.0), row, fastest=fastest))
        found.append((row["detail"]["tpot_of_runs"], row["tpot_ms"]))
    # After the warm prefix and a batch come, three times, three short ones and a long one.
    assert found == [
        ("median", pytest.approx(20 + 10 + 8)),
        ("fastest", pytest.approx(20 + 6 + 13)),
    ]


def test_a_slow_short_batch_makes_no_step_fast():
    class Busy(FakeClient):
        """The second of three short batches is slow; the server takes one request in at a time."""

        waits = itertools.cycle([0.0, 0.15, 0.0])

        async def batch(self, prompts, tokens, *, logprobs=False):
            answers, seconds = await super().batch(prompts, tokens, logprobs=logprobs)
            short = 1 < tokens < 10
            return answers, seconds + (next(self.waits) if short else 0.0)

    client = Busy(0.02, 0.05)
    client.takes_in_together = False
    row = row_of()
    asyncio.run(measure(grid_case(MODEL, 8, 4, 4), 10, 3, client, row, fastest=True))
    assert 1 < row["detail"]["tpot_from_tokens"] < 10
    assert row["tpot_ms"] == pytest.approx(20.0)


@pytest.mark.parametrize("apart", [0.0, 0.03, 0.2])
def test_requests_that_come_one_by_one_are_timed_when_all_decode(apart):
    class OneByOne(FakeClient):
        """A step takes 5 ms, and 2 ms for every request; requests arrive `apart` seconds apart."""

        async def batch(self, prompts, tokens, *, logprobs=False):
            now, left = 0.0, [tokens] * len(prompts)
            while any(left):
                running = [i for i in range(len(left)) if left[i] and i * apart <= now]
                now += 0.005 + 0.002 * len(running) if running else 0.001
                for i in running:
                    left[i] -= 1
            return [], now

    row, client = row_of(), OneByOne()
    client.takes_in_together = False
    asyncio.run(measure(grid_case(MODEL, 8, 16, 4), 20, 1, client, row))
    assert row["tpot_ms"] == pytest.approx(5 + 2 * 16, rel=0.02)
    asyncio.run(measure(grid_case(MODEL, 8, 16, 4), 20, 1, client, row, room=3))
    assert row["detail"]["tpot_from_tokens"] <= 3


def test_a_time_that_is_lost_in_the_noise_is_no_time():
    row = row_of()
    client = FakeClient(seconds_a_token=-0.001, seconds_before=3.0)
    asyncio.run(measure(grid_case(MODEL, 8, 4, 4), 10, 3, client, row))
    assert row["tpot_ms"] is None
    assert row["detail"]["tpot_runs_ms"] == pytest.approx([-1.0] * 3)


def test_percentiles_are_nearest_ranks():
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0, 0.0)] == [50, 99, 100, 1]
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


# -- trees -----------------------------------------------------------------------------------

LENGTHS = {0: 10, 1: 3, 2: 5, 3: 4, 4: 0, 5: 2}
CHILDREN = {0: (1, 2), 1: (3, 4), 2: (), 3: (), 4: (5,), 5: ()}


def the_tree():
    return ThoughtTree("a prompt", False, lay_out(LENGTHS, CHILDREN))


def test_children_go_on_from_their_parents_answer():
    client, row = FakeClient(), row_of("tree")
    tree = the_tree()
    asyncio.run(tree_replay.replay_tree("t", tree, MODEL, client, row, 1))
    asked = {tokens: prompt for prompt, tokens in client.asked}
    assert sorted(asked) == [2, 3, 4, 5]  # the empty thought is not sent; its child is
    root = asked[3][: LENGTHS[0]]
    assert asked[5][: LENGTHS[0]] == root
    assert [len(asked[tokens]) for tokens in (3, 5)] == [12, 12]
    parent = asked[3] + tuple(decode(asked[3], 3).ids)
    for tokens in (4, 2):
        assert asked[tokens][: len(parent)] == parent
        assert len(asked[tokens]) == len(parent) + tree_replay.MARK
    assert len({prompt[-2:] for prompt in asked.values()}) == 4
    assert row["detail"]["thoughts"] == 4
    assert row["detail"]["iterations"] == tree.last_iteration == 7
    assert row["tpot_ms"] == pytest.approx(10.0)
    longest = max(len(prompt) + tokens for prompt, tokens in client.asked)
    assert tree_replay.longest_path(tree) >= longest


class Replays(FakeClient):
    """Every replay has its own speed, and its requests are recorded separately."""

    def __init__(self, seconds_a_token):
        super().__init__()
        self.speeds = iter(seconds_a_token)
        self.prompts = []
        self.by_replay = []

    async def batch(self, prompts, tokens, *, logprobs=False):
        self.seconds_a_token = next(self.speeds)
        self.prompts += prompts
        self.asked = []
        self.by_replay.append(self.asked)
        return await super().batch(prompts, tokens, logprobs=logprobs)


def replayed(repeats, seconds, speeds):
    """The row of replays of the tree; each takes its value of `seconds`."""
    client, row = Replays(speeds), row_of("tree")
    clock = itertools.count(0.0, seconds).__next__
    replay = tree_replay.replay_tree("t", the_tree(), MODEL, client, row, repeats, clock=clock)
    asyncio.run(replay)
    return row, client


def test_the_median_of_a_trees_replays_counts():
    row, client = replayed(3, 2.0, [0.01, 0.03, 0.02])
    assert row["tpot_ms"] == pytest.approx(20.0)
    assert row["detail"]["tpot_runs_ms"] == pytest.approx([10.0, 30.0, 20.0])
    assert row["detail"]["tokens_per_s_runs"] == [7.0] * 3
    assert row["tokens_per_s"] == 7.0
    assert row["detail"]["thoughts"] == 4
    assert set(row["detail"]["steps_ms"]["ms"]) == {20.0}
    assert row["itl_p99_ms"] == pytest.approx(30.0)  # over all replays' answers
    assert len(client.by_replay) == 3
    of_two, _ = replayed(2, 2.0, [0.03, 0.01])
    assert of_two["tpot_ms"] == pytest.approx(20.0)
    assert set(of_two["detail"]["steps_ms"]["ms"]) == {10.0}


def test_a_replay_finds_only_its_own_prompt_cached():
    _, client = replayed(3, 2.0, [0.01] * 3)
    assert len({prompt[:4] for prompt in client.prompts}) == 3
    for prompt, asked in zip(client.prompts, client.by_replay, strict=True):
        assert {sent[: len(prompt)] for sent, _ in asked} == {prompt}
    again = replayed(3, 2.0, [0.01] * 3)[1]
    assert again.by_replay == client.by_replay  # another backend gets the same


def test_a_steps_latency_is_the_median_of_those_alive():
    def answered(start, arrivals):
        answer = decode([1], len(arrivals))
        answer.arrivals = arrivals
        return tree_replay.ThoughtAnswer(start, answer)

    answers = [
        answered(1, [0.5, 0.6, 0.8]), answered(1, [0.5, 0.9]), answered(2, [9.0, 9.4, 9.5]),
    ]  # fmt: skip
    steps = tree_replay.step_latencies(answers)
    assert list(steps) == [2, 3, 4]
    assert steps[2] == pytest.approx((0.1 + 0.4) / 2)
    assert steps[3] == pytest.approx((0.2 + 0.4) / 2)
    assert steps[4] == pytest.approx(0.1)
    points = tree_replay.plotted({i: 0.001 * i for i in range(1, 1001)})
    assert len(points["ms"]) <= tree_replay.POINTS
    assert points["iteration"][0] == points["ms"][0] == 2.0


# -- answers ---------------------------------------------------------------------------------

SAMPLES = [((1, 2, 3, 4), 12), ((9, 9), 7)]


def checked(mode, tolerance, answers):
    """Check answers of a server with the behaviour `answers` against a server with `mode`."""
    client = FakeClient()
    client.mode = mode
    samples = [(prompt, decode(prompt, tokens, answers).ids) for prompt, tokens in SAMPLES]
    return asyncio.run(check(samples, client, tolerance))


def test_right_answers_are_found_right_to_their_last_token():
    found = checked("right", 0.0, "right")
    assert (found.answers, found.tokens, found.ties, found.wrong) == (2, 19, [], [])


def test_every_tie_is_found_and_what_follows_it_is_looked_at():
    found = checked("right", GAP, "tie")
    assert found.tokens == 19
    # positions divisible by five: 5, 10, 15 of the first context, 5 of the second
    assert found.ties == pytest.approx([GAP] * 4)
    assert not found.wrong


def test_beyond_the_tolerance_a_tie_is_wrong():
    found = checked("right", GAP / 2, "tie")
    assert len(found.wrong) == 4  # the tokens after a wrong token are also checked
    assert "0.125 less likely" in found.wrong[0]
    assert not found.ties
    assert found.tokens == 19


def test_a_wrong_token_is_told_apart_from_ties():
    found = checked("right", 0.2, "wrong")
    assert len(found.wrong) == 4
    assert not found.ties
    expected = third_choice([1, 2, 3, 4, decode([1, 2, 3, 4], 1).ids[0]])
    assert f"token 1: {expected} instead of" in found.wrong[0]
    assert "8.5 less likely" in found.wrong[0]


def test_a_tie_that_the_reference_does_not_list_is_a_tie():
    """The server lists a few tokens; others may be equally likely."""
    found = checked("right", 8.5, "wrong")
    assert found.ties == [8.5] * 4
    assert not found.wrong


def test_an_answer_that_is_wrong_all_over_is_left(monkeypatch):
    monkeypatch.setattr(checked_answers, "MOST_WRONG", 2)
    found = checked("right", 0.2, "wrong")
    seen = sorted(text.split(" (")[0] for text in found.wrong)
    assert seen == ["answer 0", "answer 0", "answer 1"]
    assert found.tokens < 19


def test_agreement_counts_up_to_where_answers_part():
    prompts = [[1, 2, 3, 4], [9, 9]]
    reference = [decode(prompt, 6) for prompt in prompts]
    found = compare(reference, [decode(prompt, 6, "tie") for prompt in prompts])
    assert (found["requests"], found["equal_answers"]) == (2, 0)
    assert found["compared_tokens"] == 1 + 3
    assert found["gap_where_parted_max"] == pytest.approx(GAP)
    assert found["logprob_difference_max"] == 0.0
    assert compare(reference, reference)["equal_answers"] == 2
    outside = compare(reference, [decode(prompt, 6, "wrong") for prompt in prompts])
    assert (outside["parted_outside_top"], outside["gap_where_parted_max"]) == (2, None)


# -- traffic ---------------------------------------------------------------------------------


class Clock:
    """Each look takes a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def drive_for(minutes, client, **sizes):
    settings = {
        "workers": 4, "documents": 3, "document_tokens": 40, "most_question_tokens": 6,
        "most_answer_tokens": 8, "samples": 25, **sizes,
    }  # fmt: skip
    traffic = Traffic(minutes, **settings)
    dead = []
    seen = asyncio.run(drive(traffic, MODEL, client, alive=lambda: dead.append(1), clock=Clock()))
    return seen, traffic, dead


def test_traffic_joins_leaves_and_keeps_samples():
    client = FakeClient()
    seen, traffic, dead = drive_for(10, client, aborted=0.25)
    assert seen.finished + seen.aborted == len(client.asked) >= 500
    assert 0.15 < seen.aborted / len(client.asked) < 0.35
    assert len(seen.samples) == 25
    place = {prompt: at for at, (prompt, _) in enumerate(client.asked)}
    places = [place[prompt] / len(client.asked) for prompt, _ in seen.samples]
    assert 0.35 < sum(places) / 25 < 0.65  # over the whole time, not only its end or beginning
    assert all(answer == decode(prompt, len(answer)).ids for prompt, answer in seen.samples)
    loners = sum(len(prompt) <= 6 for prompt, _ in client.asked)
    assert 0.1 < loners / len(client.asked) < 0.3
    assert len({prompt[:40] for prompt, _ in client.asked if len(prompt) > 6}) > 3  # replaced
    assert max(len(prompt) + tokens for prompt, tokens in client.asked) <= traffic.longest
    assert seen.evicted > 0  # this client reports no cached tokens
    assert not seen.failures
    assert not dead


@pytest.mark.parametrize(("kept", "evicted"), [(None, None), (1.0, 0), (0.5, 0), (0.4, "all")])
def test_what_a_cache_had_kept_tells_what_it_evicted(kept, evicted):
    """Earlier documents with less than half of their tokens in the cache count as evicted."""
    again = 0

    class Keeping(FakeClient):
        async def stream(self, prompt, *args, **kwargs):
            nonlocal again
            again += any(known[:40] == prompt[:40] for known, _ in self.asked if len(known) > 6)
            answer = await super().stream(prompt, *args, **kwargs)
            answer.cached = None if kept is None else int(kept * 40)
            return answer

    seen, _, _ = drive_for(2, Keeping(), workers=1, aborted=0.0)
    assert again > 50
    assert seen.evicted == (again if evicted == "all" else evicted)


def test_failures_are_told_and_a_dead_server_ends_it():
    class Refusing(FakeClient):
        async def stream(self, *args, **kwargs):
            raise RuntimeError("gone")

    def died():
        raise ChildProcessError("the server ended")

    traffic = Traffic(1, workers=2, documents=2, document_tokens=8)
    with pytest.raises(ChildProcessError):
        asyncio.run(drive(traffic, MODEL, Refusing(), alive=died, clock=Clock()))
    seen, _, dead = drive_for(0.05, Refusing())
    assert seen.failures
    assert "gone" in seen.failures[0]
    assert dead
    assert seen.to_dict()["failures"] == len(seen.failures)


def test_growth_leaves_out_the_first_third():
    samples = [{"rss_mib": rss, "gpu_mib": None} for rss in (10.0, 50.0, 80.0, 81.0, 82.0, 83.5)]
    assert growth(samples) == {"rss_mib": 3.5, "gpu_mib": None}
