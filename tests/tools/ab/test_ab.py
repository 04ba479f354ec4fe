"""`deft ab`: two made-up servers, what becomes of requests, the tokens, and the sentence."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from html import unescape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

import commands
from counted_steps import host_step, tree_step
from deft_backend.compile.clock import COMPILING
from deft_backend.telemetry.counters import MIXED, Content, Counters, Steps
from deft_backend.telemetry.metrics import register_states
from deft_backend.telemetry.state import StateWriter
from deft_backend.tools.ab import sides
from deft_backend.tools.ab.agreement import Agreement, Difference, agreement
from deft_backend.tools.ab.report import print_result, verdict, write_report
from deft_backend.tools.ab.result import AbResult, ComparedWorkload, Measured, Server, paired_change
from deft_backend.tools.harness import open_loop
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.client import Offers, ServerClient
from deft_backend.tools.harness.server_counters import ServerCounters, counters_of_page
from deft_backend.tools.harness.workload import Outcome, Replayed, Request, Workload, replay
from deft_backend.tools.servers.command import ServerCommand, StartError
from deft_backend.tools.traces.arrivals import load_arrivals
from drawings import check_drawn, terminal
from failure_lines import raising
from fake_completions import Fake, replayed, serving
from sglang_fakes import make_state

SMALL = ("--branches", "9", "--prefix-tokens", "120", "--max-tokens", "6")


def ab(folder, *arguments, code=0):
    out, where = folder / "out", {"COLUMNS": "100", "DEFT_CACHE_DIR": str(folder / "cache")}
    found, *printed = commands.run("ab", "--out", str(out), *arguments, **where)
    assert found == code, printed
    data = out / "results.json"
    said = " ".join(" ".join(printed).split())
    return json.loads(data.read_text()) if data.exists() else {}, said


def workloads(*names):
    return [word for name in names for word in ("--workload", name)]


def page_of(folder):
    page = (folder / "out" / "report.html").read_text()
    return " ".join(unescape(re.sub("<[^>]*>", "", page)).split())


def workload_of(*requests):
    return Workload("made-up", "", (), requests)


def request(name, **fields):
    return Request(name, lambda: f"prompt {name}", fields.pop("tokens", 4), **fields)


COUNTED = """
deft_decode_steps_total{kind="decode",kernel="tree",tp_rank="0"} REQUESTS
deft_decode_steps_total{kind="decode",kernel="host",tp_rank="0"} 0"""


def test_two_equal_servers(tmp_path):
    """The page of one of them counts a decode step for each request that it got."""
    with serving(Fake(metrics=COUNTED)) as a, serving(Fake()) as b:
        all_kinds = workloads("few-shot", "tree-of-thoughts", "rollout", "chains")
        urls = ("--urls", a.url, f"{b.url}/v1")
        data, printed = ab(tmp_path, *urls, *all_kinds, *SMALL, "--exact")
    assert [s["url"] for s in data["sides"]] == [a.url, b.url]
    for workload in data["workloads"]:
        assert workload["agreement"]["compared"] == workload["agreement"]["equal"] > 0
        assert not any(figures["lost"] for figures in workload["figures"])
        (counted, unknown), asked = workload["counters"], len(workload["requests"][0])
        assert (counted["decode_steps"], unknown) == (asked + 1, None)  # the prefix, once before
        reads, unknown = workload["kv_bytes_a_step"]
        assert (reads.keys(), unknown) == ({"query_by_query", "read", "saved"}, None)
    # Both got the same requests, in equal numbers.
    sent = [[(f["prompt"], f["max_tokens"]) for f in fake.bodies] for fake in (a, b)]
    assert sorted(sent[0]) == sorted(sent[1])
    thoughts = [p for p, _ in sent[0] if "Count from" in p]
    assert any(p.count("Count from") > 1 for p in thoughts)  # a child continues its parent
    assert "answers are the same" in printed
    assert "do not fit" not in printed
    assert data["same"]
    assert not data["interrupted"]
    page = page_of(tmp_path)
    assert data["verdict"] in page
    assert "http" not in page.replace(a.url, "").replace(b.url, "")


def test_a_trace_with_its_own_times_and_a_small_context(tmp_path):
    trace = Path(__file__).parents[2] / "support" / "arrivals.jsonl"
    arrivals = load_arrivals(trace)
    fits = sorted(a.input_length + a.output_length for a in arrivals)[8]
    with serving(Fake()) as a, serving(Fake(context=fits)) as b:
        data, printed = ab(tmp_path, "--urls", a.url, b.url, "--trace", str(trace))
        assert len(a.bodies) <= 11 + 3
    (workload,) = data["workloads"]
    fit = sum(a.input_length + a.output_length <= fits for a in arrivals)
    second = workload["figures"][1]
    assert (second["answered"], second["lost"]) == (fit, {"too long": 11 - fit})
    assert f"{11 - fit} of 11 requests do not fit the server's context" in printed
    # Times of sending follow the trace.
    due = [record["due"] for record in workload["requests"][0]]
    assert due[-1] == pytest.approx((arrivals[10].timestamp - arrivals[0].timestamp) / 1000, 0.01)
    for record in workload["requests"][0]:
        assert record["sent"] >= record["due"] - 1e-3
    counted = [r["prompt_tokens"] for r in workload["requests"][0] if r["prompt_tokens"]]
    asked = [a.input_length for a in arrivals]
    assert counted == pytest.approx(asked, rel=0.02)


def test_each_fault_is_counted_under_its_name():
    faults = {"p4": 404, "p5": 503, "pd": "drop", "pe": "error", "p0": "empty"}
    # A proxy in between may close the stream of a server that died as if it were complete.
    faults |= {"pc": "cut", "pn": "end"}
    with serving(Fake(faults=faults, context=60, shows_context=False)) as fake:
        workload = workload_of(
            *(request(name) for name in (*faults, "ok")),
            request("long", tokens=70),
            request("child", after="ok"),
            request("orphan", after="p5"),
        )
        found = replayed(fake, replace(workload, warm=("prompt p5",)))
    assert (fake.bodies[0]["prompt"], fake.bodies[0]["max_tokens"]) == ("prompt p5", 1)
    statuses = {outcome.name: outcome.status for outcome in found.outcomes}
    ended = {"failed": "p5 pe p0", "lost": "pd pc", "answered": "pn ok child"}
    expected = {name: status for status, names in ended.items() for name in names.split()}
    assert statuses == expected | {"p4": "refused", "long": "too long", "orphan": "not sent"}
    assert not found.died
    assert found.outcomes[-1].detail == "it continues p5, which has no answer"
    assert "404" in found.outcomes[0].detail
    said = found.outcomes[5].detail
    assert said == "the stream ended after 1 of 4 tokens, without an end mark"


def test_a_run_that_compared_nothing_says_so(tmp_path, monkeypatch):
    """No request fits, and no server had told its context."""
    monkeypatch.chdir(tmp_path)
    with serving(Fake(context=99, shows_context=False)) as fake:
        of = ("--urls", fake.url, fake.url, "--workload", "unshared")
        _, printed = ab(tmp_path, *of, *SMALL, code=2)
        assert commands.run("ab", *of, *SMALL, DEFT_CACHE_DIR=str(tmp_path))[0] == 2
    (_,) = tmp_path.glob("reports/ab-2[0-9]*-[0-9]*/results.json")
    assert "nothing was compared: no request was answered by both servers" in printed


def test_a_run_that_ends_while_it_warms_sends_nothing(monkeypatch):
    monkeypatch.setattr("deft_backend.tools.harness.workload._PAUSES", (0.0,))
    warmed = replace(workload_of(request("a"), request("b", after="a")), warm=("prefix",))

    async def interrupted(fake):
        async with ServerClient(fake.url) as client:
            running = asyncio.create_task(replay(warmed, client))
            while not fake.bodies:
                await asyncio.sleep(0.01)
            running.cancel()
            return await running

    with serving(Fake(dies_after=0)) as dead, serving(Fake(token_seconds=1.0)) as slow:
        ends = replayed(dead, warmed), asyncio.run(interrupted(slow))
    assert "no longer answers" in ends[0].died
    assert (ends[1].died, ends[1].interrupted) == ("", True)
    assert {o.status for end in ends for o in end.outcomes} == {"not sent"}
    assert len(dead.bodies) == len(slow.bodies) == 1


@pytest.mark.parametrize("goodput", [False, True])
def test_a_server_that_dies_ends_the_run(tmp_path, monkeypatch, goodput):
    """The end of its log tells why. Goodput is sought after the first workload."""
    monkeypatch.setattr(open_loop, "_RANGE", 1.0)
    alive = raising(StartError("the server ended with exit code -9"))
    monkeypatch.setattr(sides, "RunningServer", partial(sides.RunningServer, check_alive=alive))
    with serving(Fake(dies_after=14)) as b, serving(Fake()) as a:
        of = ["--goodput"] * goodput + workloads("few-shot", "unshared")
        of += ["--rate", "60", *SMALL]
        data, printed = ab(tmp_path, "--urls", a.url, b.url, *of, code=1)
    assert data["verdict"].startswith("Do not switch: B died during the run")
    assert "ended with exit code -9" in printed
    assert [w["workload"] for w in data["workloads"]] == ["few-shot", "unshared"]
    assert data["workloads"][1]["figures"][0]["answered"] == 9
    assert data["workloads"][0]["figures"][1]["answered"] == 9
    lost = data["workloads"][-1]["figures"][1]["lost"]
    assert (sum(lost.values()) == 0) is goodput
    died = [w["died"] == ["", "the server ended with exit code -9"] for w in data["workloads"]]
    assert died == [goodput, not goodput]
    assert (tmp_path / "out" / "report.html").exists()


def test_an_open_loop_shows_gaps_and_goodput(tmp_path, monkeypatch):
    """Each trial sends other texts; their sharing stays."""
    monkeypatch.setattr(open_loop, "_RANGE", 4.0)
    with serving(Fake(token_seconds=0.35)) as a, serving(Fake()) as b:
        asked = ("--goodput", "--bound-ms", "300", "--rate", "100", *SMALL, "--max-tokens", "3")
        of = ("--urls", a.url, b.url, "--workload", "few-shot")
        data, printed = ab(tmp_path, *of, *asked)
    (workload,) = data["workloads"]
    gaps = [figures["gap_ms"]["p50"] for figures in workload["figures"]]
    assert gaps[0] == pytest.approx(350, rel=0.2)
    assert gaps[1] < 100
    slow, fast = workload["goodput"]
    assert (slow["rate"], [rate for rate, _ in slow["trials"]]) == (0.0, [100.0, 50.0, 25.0])
    assert (fast["rate"], fast["reached"]) == (400.0, False)
    assert "Goodput: 99 % of gaps below 300 ms" in printed
    assert "few-shot 0/s at least 400/s" in printed
    prompts = [body["prompt"] for body in b.bodies if body.get("stream")][-20:]
    firsts, lasts = prompts[:10], prompts[10:]
    assert {p.partition(". ")[2] for p in firsts} == {p.partition(". ")[2] for p in lasts}
    assert not set(firsts) & set(lasts)


@pytest.mark.parametrize("of_second", [False, True])
def test_a_cache_of_8_bits_makes_larger_margins_near_ties(tmp_path, of_second):
    """The state file of either server says so; the report names the limit."""
    with serving(Fake(margin=0.4)) as a, serving(Fake(salt="z", margin=0.4)) as b:
        state = make_state()
        state.port, state.dtype_bytes = urlsplit((b if of_second else a).url).port or 0, 1
        StateWriter(state, tmp_path / "cache" / "servers").look()
        given = ("--urls", a.url, b.url, "--workload", "few-shot", *SMALL)
        data, printed = ab(tmp_path, *given)
        assert data["workloads"][0]["agreement"]["close"] == pytest.approx(0.45)
        assert "where a server was sure" not in printed
        assert "less than 0.45 apart" in page_of(tmp_path)
        b.margin = 0.5
        _, printed = ab(tmp_path, *given, code=1)
    assert "9 of 9 answers differ where a server was sure of its token" in printed


@pytest.mark.parametrize("piece", [1, 5])
def test_a_difference_inside_a_piece_of_several_tokens(tmp_path, piece):
    """Servers that speculate send several tokens at a time; only the whole piece has a text."""
    other = Fake(salt="z", margin=0.02, piece_tokens=piece)
    with serving(Fake(margin=0.01)) as a, serving(other) as b:
        data, _ = ab(tmp_path, "--urls", a.url, b.url, "--workload", "few-shot", *SMALL)
    difference = data["workloads"][0]["agreement"]["differences"][0]
    assert (difference["position"], difference["margin"]) == (3, pytest.approx(0.02))
    asked = [body for body in b.bodies if body.get("logprobs")]
    sent = {body["prompt"] for body in b.bodies if body.get("stream")}
    assert len(asked) == 9
    for body in asked:  # behind the three tokens before it
        *prompt, one, two, three = map(chr, body["prompt"])
        assert "".join(prompt) in sent
        assert b._answer("".join(prompt), 6)[:3] == one + two + three


def test_ctrl_c_leaves_a_report_of_what_there_is(tmp_path):
    with serving(Fake(token_seconds=0.02)) as a:
        command = [sys.executable, "-m", "deft_backend", "ab", "--out", str(tmp_path), "--urls"]
        command += [a.url, a.url, *workloads("few-shot"), "--rate", "2", *SMALL]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        end = time.monotonic() + 60
        while len(a.bodies) < 7 and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130, printed
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["interrupted"]
    (first, _) = data["workloads"][0]["figures"]
    assert 0 < first["answered"] < 9
    assert first["answered"] + sum(first["lost"].values()) == 9
    assert set(first["lost"]) <= {"cut off", "not sent"}
    assert "No decision" in data["verdict"]


def test_counters_come_from_the_state_file_or_the_page(tmp_path):
    """Two ranks on a page that the library writes, with the host's own metrics before ours."""
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    client.Counter("host_requests", "Requests: {all}, \\ and more.", registry=registry).inc()
    register_states(tmp_path, 1, registry)
    for rank in (1, 0):
        state = make_state()
        state.rank = rank
        tree_step(state, tokens=10, loaded=4)
        tree_step(state, tokens=9, loaded=8, rows=3, kind=MIXED)
        host_step(state, 'a "b"', 5, kind=MIXED)
        StateWriter(state, tmp_path).look()
    page = client.generate_latest(registry).decode()
    assert "# HELP deft_decode_steps_total Steps that decode" in page
    own = state.counters()  # of a rank: all ranks run the same steps, on their own parts of the KV
    read, guided = 2 * own.kv_bytes_read, 2 * own.kv_bytes_query_guided
    expected = replace(own, kv_bytes_read=read, kv_bytes_query_guided=guided)
    expected = replace(expected, compile_seconds=COMPILING.seconds)
    assert counters_of_page(page) == expected
    for wrong in ("vllm:x 3", "<html>no metrics</html>", 'deft_decode_steps_total{kernel="tree" 3'):
        assert counters_of_page(wrong) is None
    with serving(Fake(metrics=page)) as fake:
        assert ServerCounters(fake.url, tmp_path / "none").read() == expected
    assert ServerCounters("http://localhost:1", tmp_path).read() == own
    assert ServerCounters("http://example.invalid:1", tmp_path).state() is None


def test_a_note_about_both_servers_is_said_once():
    console = terminal()
    progress = sides.Progress(console)
    for name in ("host", "deft"):
        progress.starting(name, ServerCommand((), {}, 1, on_gpu=False, notes=("a note",)))()
        assert progress.finished
    assert console.file.getvalue().count("a note") == 1


def side(tpot, ttft=0.1, count=20, lost=0):
    answers = []
    for i in range(count):
        arrivals = [ttft + at * tpot * (1 + i / 100) for at in range(11)]
        answers.append(Answer(ids=[1] * 11, text="x" * 11, arrivals=arrivals))
    found = [Outcome(f"r{i}", 0.0, 0.0, "answered", "", 11, a) for i, a in enumerate(answers)]
    found += [Outcome(f"l{i}", 0.0, 0.0, "failed", "500", 11) for i in range(lost)]
    return Replayed(tuple(found), 5.0)


def result(*runs, device="cuda", **fields):
    offers = Offers("m", None, 4.0)
    servers = tuple(Server(name, "http://x", offers, device=device) for name in "AB")
    workloads = [
        ComparedWorkload(f"w{at}", "", "", tuple(map(Measured, pair)), agreement(*pair))
        for at, pair in enumerate(runs)
    ]
    values = {"interrupted": False, **fields}
    return AbResult(("A", "B"), servers, tuple(workloads), **values)


SENTENCES = (
    [(side(0.02), side(0.01))],
    [(side(0.01), side(0.02))],
    [(side(0.01), side(0.0099))],
    [(side(0.02), side(0.01, ttft=0.2))],
    [(side(0.02), side(0.01, ttft=0.114)), (side(0.01), side(0.01))],
    [(side(0.02), side(0.01)), (side(0.01), side(0.02))],
    [(side(0.02, count=7), side(0.01, count=7))],
    [(side(0.02, count=8), side(0.01, count=8))],
    [(side(0.02), side(0.01, lost=2))],
    [(side(0.02, lost=2), side(0.01, lost=2))],
    [],
)


def test_the_change_is_the_median_between_order_statistics():
    """Of 20 requests, those of ranks 5 and 14 bound it: half of them, and 4.4 to either side."""
    ranks = [at * 7 % 20 for at in range(20)]
    slower = [side(0.01 * 1.001**rank**2).outcomes[at] for at, rank in enumerate(ranks)]
    runs = Measured(side(0.01)), Measured(Replayed(tuple(slower), 5.0))
    found = paired_change(ComparedWorkload("w", "", "", runs, Agreement(0, 0)))
    expected = [1.001**power - 1 for power in ((9**2 + 10**2) / 2, 5**2, 14**2)]
    assert found == pytest.approx(expected, abs=1e-9)


DIFFERENT = Agreement(
    compared=20,
    equal=6,
    differences=(
        Difference("r0", 4, 0.15, (("cat", -0.25), ("dog", None))),
        Difference("r1", 5, 0.149, (("a", -1.0), ("b", -1.0))),
        Difference("r2", 6, None, (("a", -1.0), ("b", -1.0))),
        *(Difference(f"s{at}", 7, 0.1, (("a", -1.0), ("b", -1.0))) for at in range(11)),
        Difference("t", 8, None),
    ),
    not_compared=2,
    tokens=100,
    largest_gap=0.0312,
)


def late(run, sent):
    """Each request is due one second after the one before, and leaves so much later."""
    due = [0.0, *map(float, range(len(run.outcomes)))]  # two at once: then none is late
    outcomes = [
        replace(o, at=at, sent=at + sent if at else 9.0)
        for at, o in zip(due, run.outcomes, strict=False)
    ]
    return replace(run, outcomes=tuple(outcomes))


def drawn_results():
    """Every table and every note: of equal servers on a CPU, and of others on a GPU."""
    steps = {Content("decode", None): Steps(4096)}
    counters = Counters(steps, 60, 13_380_000_000 * 4096, 99_990_000_000 * 4096)
    slow = result((side(0.9, ttft=71.2, count=320), side(5.7, ttft=98.7, count=320)), device="cpu")
    same = Agreement(320, 320, tokens=320)
    pair = slow.workloads[0].sides[0], replace(slow.workloads[0].sides[1], counters=counters)
    workload = replace(slow.workloads[0], name="document-questions", sides=pair, agreement=same)
    yield replace(slow, workloads=(workload,), names=("host", "deft"), exact=True)

    host_steps = {Content("decode", "off"): Steps(3), Content("mixed", None): Steps(1)}
    counted = Counters(host_steps, 1, 0, 4_000)
    rates = open_loop.Goodput(4.0, True, 50.0, ()), open_loop.Goodput(6.0, False, 50.0, ())
    runs = late(side(0.02, lost=1), 0.049), late(side(0.01, lost=7), 0.0501)
    fast = result(runs, (side(0.01), side(0.0099)), interrupted=True, exact=True)
    first, second = fast.workloads
    first = replace(
        first,
        agreement=DIFFERENT,
        sides=tuple(
            replace(measured, counters=counted, goodput=rate)
            for measured, rate in zip(first.sides, rates, strict=True)
        ),
        description="20 requests",
        arrivals="one a second",
    )
    pair = replace(second.sides[0], goodput=rates[0]), second.sides[1]
    second = replace(second, agreement=Agreement(1200, 1200), sides=pair)
    given = {"backend": "fa3", "command": "serve [--port] 1"}, {"backend": "deft", "policy": "auto"}
    offers = Offers("m", 8192, 4.0)
    servers = [replace(s, **more) for s, more in zip(fast.servers, given, strict=True)]
    servers[1] = replace(servers[1], offers=offers)
    facts = {"date": "2026-01-02", "commit": None, "versions": {"torch": "2.9"}}
    yield replace(fast, workloads=(first, second), servers=tuple(servers), provenance=facts)


def test_the_terminal_and_the_page_are_as_drawn(tmp_path):
    """No word is broken at 80 columns, with the longest names and the slow steps of a CPU."""
    every = []
    for at, found in enumerate(drawn_results()):
        console = terminal()
        print_result(found, console)
        page, data = write_report(found, tmp_path / str(at), "deft ab [x]")
        modes = [path.stat().st_mode & 0o777 for path in (page.parent, page, data)]
        assert modes == [0o700, 0o600, 0o600]
        shown = unescape(re.sub("<[^>]*>", "", page.read_text()))
        every += [console.file.getvalue(), shown]
        content = json.loads(data.read_text(), parse_float=lambda text: round(float(text), 9))
        for workload in content["workloads"]:
            workload["requests"] = [requests[:2] for requests in workload["requests"]]
            every += map(str, workload.items())
        every += [str(pair) for pair in content.items() if pair[0] != "workloads"]
    assert "…" not in every[0]
    every += [verdict(result(*pairs)) for pairs in SENTENCES]
    text = re.sub(r" +$", "", "\n".join(every), flags=re.MULTILINE)
    check_drawn(text, Path(__file__).with_name("results.ansi"))


def told(name, pieces, *logprobs):
    """The outcome of a request whose answer came in these pieces, or letter by letter."""
    answer = Answer(
        ids=[ord(piece[-1]) for piece in pieces],
        tokens=list(pieces),
        text="".join(pieces),
        arrivals=[float(at) for at in range(len(pieces))],
        logprobs=list(logprobs),
        top=[{"a": value, "b": value - 1} for value in logprobs],
    )
    return Outcome(name, 0.0, 0.0, "answered", "", len(pieces), answer)


def compared(first, second, after=None):
    return agreement(Replayed(tuple(first), 1.0), Replayed(tuple(second), 1.0), after)


@pytest.mark.parametrize(
    ("first", "second", "at"),
    [("abcd", "abcd", None), ("abcd", "abce", 3), ("axyz", "abcd", 1), ("abcd", "ab", 2)],
)
def test_an_answer_differs_at_its_first_other_token(first, second, at):
    found = compared([told("r", first)], [told("r", second)])
    assert [d.position for d in found.differences] == ([] if at is None else [at])
    assert (found.compared, found.equal) == (1, int(at is None))
    assert found.tokens == (4 if at is None else at)


def test_only_margins_of_near_ties_explain_a_difference():
    same = result((side(0.01), side(0.01)))
    near = replace(same.workloads[0], agreement=Agreement(1, 0, (Difference("r", 2, 0.14),)))
    for found, exact, faults in ((same, True, False), (near, False, False), (near, True, True)):
        workloads = (found,) if found is near else same.workloads
        assert replace(same, workloads=workloads, exact=exact).faults is faults
    for margin, count in ((0.49, 0), (0.5, 1), (None, 0)):
        assert Agreement(1, 0, (Difference("r", 2, margin),), close=0.5).unexplained == count


def test_a_plugin_that_counts_no_step_is_no_comparison(tmp_path, monkeypatch):
    """The host's own backend comes first, then the plugin, and never both at once."""
    pytest.importorskip("sglang")
    running, started = [], []

    @contextmanager
    def start(command, log):
        """In place of a real server: a made-up one, which counts nothing."""
        backend = dict(pairwise(command.arguments)).get("--attention-backend")
        started.append(backend)
        log.write_text("deft: these layers run through fa3\n")
        assert not running
        with serving(Fake()) as fake:
            running.append(fake.url)
            folder = tmp_path / "cache" / "servers"
            yield SimpleNamespace(url=fake.url, state_folder=folder, check_alive=lambda: None)
        running.clear()

    monkeypatch.setattr(sides, "ServerProcess", start)
    monkeypatch.setattr(sides.Progress, "starting", lambda *_: partial(started.append, "answers"))
    options = ("--host", "sglang", "--rate", "100")
    _, printed = ab(tmp_path, *options, "--workload", "few-shot", *SMALL, code=2)
    assert started == [None, "answers", "deft", "answers"]
    assert "log says 'deft: these layers run through fa3'. The log is" in printed


def test_exact_shows_both_log_probabilities_of_a_difference(tmp_path):
    """Even a near tie ends with exit code 1; what continues a difference is not compared."""
    with serving(Fake()) as a, serving(Fake(salt="z", margin=0.02)) as b:
        of = ("--exact", *workloads("few-shot", "tree-of-thoughts"), *SMALL)
        data, printed = ab(tmp_path, "--urls", a.url, b.url, *of, code=1)
    assert all(body["logprobs"] == 2 for body in (*a.bodies, *b.bodies) if body.get("stream"))
    few, tree = (workload["agreement"] for workload in data["workloads"])
    difference = few["differences"][0]
    (first, second) = difference["tokens"]
    assert (first[1], second) == (-0.1, ["z", -0.1])
    assert difference["margin"] == pytest.approx(9.0)  # the surer server counts
    assert f"after 3 tokens A says '{first[0]}' (-0.100), B says 'z' (-0.100)" in printed
    assert (few["tokens"], few["largest_gap"]) == (9 * 3, 0.0)
    assert tree["not_compared"] > 0
    thoughts = sum(len(requests) for requests in data["workloads"][1]["requests"]) // 2
    assert tree["compared"] + tree["not_compared"] == thoughts
    assert not data["same"]
    assert "B says 'z' (-0.100)" in page_of(tmp_path)


def test_the_largest_gap_is_of_the_tokens_that_agree():
    found = compared(
        [told("r", "abcd", -0.1, -0.2, -0.3, -0.1)], [told("r", "abcz", -0.1, -0.8, -0.4, -5.0)]
    )
    assert found.largest_gap == pytest.approx(0.6)
    assert found.tokens == 3
    (difference,) = found.differences
    assert difference.tokens == (("d", -0.1), ("z", -5.0))
    assert difference.margin == pytest.approx(1.0)
    one, other = (told("r", f"ab{last}", -0.1, -0.2, -0.3) for last in "cd")
    one.answer.top[2] = other.answer.top[2] = {"c": -0.3}  # nobody tells of a second token
    assert compared([one], [other]).differences[0].margin is None
    silent = told("r", "abe")  # a server may leave out log-probabilities
    for pair in ((one, silent), (silent, one)):
        assert compared(*([each] for each in pair)).differences == (Difference("r", 2, None),)


def test_no_descendant_of_a_difference_is_compared():
    """The answer of "c" is equal, but its prompt held a different one."""
    after = {"a": (), "b": ("a",), "c": ("d", "b"), "d": ()}  # "c" got what "b" returned
    first, second = (
        [told("a", text, -0.1), *(told(name, "x", -0.1) for name in "bcd")] for text in "yz"
    )
    found = compared(first, second, after)
    assert (found.equal, found.not_compared, len(found.differences)) == (1, 2, 1)
    assert compared(first, second[1:]).equal == 3  # the first is lost, and the others count
