"""The `deft` command: help and its page, one-line errors for bad input, what commands do."""

import errno
import json
import os
import re
import shlex
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attention_checks import tree_attention
from commands import run
from deft_backend.cli import ab_run, views
from deft_backend.compile.kernel_folder import Origin, Taken, take
from deft_backend.compile.variants import compile_all, compiling_for
from deft_backend.forest import build_forest
from deft_backend.hosts.common.described_server import DescribedServer
from deft_backend.kernels import Gpu
from deft_backend.policies import Invariant, get_policy
from deft_backend.settings.config import Settings
from deft_backend.settings.version import VERSION
from deft_backend.telemetry import state_reader
from deft_backend.tools.explain import server_target
from deft_backend.tools.harness.client import Offers
from deft_backend.tools.servers import command as command_module
from deft_backend.tools.servers.command import installed_hosts
from deft_backend.tools.watch import engines
from deft_backend.tools.watch.page_server import PageServer
from failure_lines import raising
from sglang_fakes import make_state
from state_files import state_path
from tools.cli_page import PAGE, page

FOREST = build_forest([0, 1], [100], [110, 120])
MODELS = json.loads(Path(__file__).with_name("models.json").read_text())


@pytest.fixture
def model(tmp_path):
    for name, config in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "m.gguf").touch()
    (tmp_path / "mistral").mkdir()
    (tmp_path / "mistral" / "params.json").write_text("{}")
    return str(tmp_path / "model")


@pytest.fixture
def commands(model, tmp_path, monkeypatch):
    """Runs each command of a file; returns the file as it should be."""
    monkeypatch.setattr(command_module, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(command_module, "ensure_driver_stub", lambda: "/stub")
    monkeypatch.setattr(sys, "argv", ["deft", "x"])
    shown = {model: "MODEL", str(tmp_path): "TMP", sys.executable: "python"}
    shown[str(Path(__file__).parents[2])] = "ROOT"
    places = {"MODEL": model, "TMP": str(tmp_path)}

    def replaced(text, words):
        for word, other in words.items():
            text = text.replace(word, other)
        return text

    def ran(path, columns):
        for line in path.read_text().splitlines():
            if line.startswith("$ "):
                before, _, after = replaced(line, places)[2:].partition("deft")
                given = {"DEFT_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": columns}
                given |= dict(word.split("=") for word in before.split())
                code, out, err = run(*shlex.split(after), **given)
                yield line, code, replaced(f"{err}{out}", shown)

    return ran


def test_refusals_are_as_drawn(commands, model, tmp_path, monkeypatch):
    """The file has each command, and the words of its refusal. A refusal leaves no file."""
    starts = raising(AssertionError("a server would start"))
    monkeypatch.setattr(ab_run, "compare", starts)
    monkeypatch.setattr(os, "execvpe", starts)
    path, every = Path(__file__).with_name("refused.txt"), []
    before = sorted(tmp_path.rglob("*"))
    for line, code, said in commands(path, "400"):
        assert code == 2, line
        every += [line, " ".join(re.sub("[─╭╮╰╯│]", "", said).split())]
    assert sorted(tmp_path.rglob("*")) == before
    assert path.read_text() == "\n".join(every) + "\n"


def compared(sides, build, model, progress, **given):
    for workload in build(Offers("m", 4096, 4.0)):
        first = workload.requests[0]
        sizes = f"{len(first.own_part())} characters, {first.max_tokens} tokens, {first.at:.3f} s"
        print(f"{workload.name}: {workload.description}; {workload.arrivals}; {sizes}")
    print([*sides], model, given)
    one = SimpleNamespace(agreement=SimpleNamespace(compared=model != "nothing"))
    return SimpleNamespace(faults=model == "faults", workloads=[one])


def test_what_commands_do_is_as_drawn(commands, tmp_path, monkeypatch):
    pytest.importorskip("sglang")

    def sides(*given, **named):
        print(given[:-1], named)
        return {"A": None, "B": None}

    follower, nodes = engines.Follower, get_policy("deft-node")

    def grouped(policy, *given):
        print("short chunks", policy.short_tokens)
        return nodes.group(*given)

    def replaced_by(file, arguments, environment):
        print(file, arguments == (file, *arguments[1:]), environment["TRITON_INTERPRET"])

    def interrupted(*given, **named):
        print(given[-1:], named)
        raise KeyboardInterrupt

    slept = iter(["again", None])

    def sleep(seconds):
        print("sleeps", seconds)
        if next(slept) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "execvpe", replaced_by)
    monkeypatch.setattr(PageServer, "serve_forever", lambda *_, **named: interrupted(**named))
    monkeypatch.setattr(views, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(views, "_FIRST_ANSWER", 0.0)
    monkeypatch.setattr(Invariant, "group", grouped)
    monkeypatch.setattr(engines, "Follower", lambda *given: print(given) or follower(*given))
    monkeypatch.setattr(DescribedServer, "variants", lambda *_: [])
    monkeypatch.setattr(ab_run, "compare", compared)
    monkeypatch.setattr(ab_run, "both_answer", print)
    monkeypatch.setattr(ab_run, "running_sides", sides)
    monkeypatch.setattr(ab_run, "started_sides", sides)
    monkeypatch.setattr(ab_run, "print_result", lambda *_: None)
    monkeypatch.setattr(ab_run, "write_report", lambda _, folder, command: (folder, command))
    arrivals = (Path(__file__).parents[1] / "support" / "arrivals.jsonl").read_text()
    (tmp_path / "t.jsonl").write_text("\n".join(arrivals.splitlines()[:3]))
    ended = {"pid": 2**22 + 1, "updated": time.time()}  # no such process
    others = {31235: {"policy": "invariant", "short_tokens": 1024}, 31237: ended}
    others[31236] = {**ended, "policy": "invariant"}  # with MLA: no rule sets its chunks
    for port, changes in {31234: {}, **others}.items():
        path = state_path(tmp_path / "cache" / "servers", port, pid=changes.get("pid"))
        path.write_text(json.dumps(state(port=port, **changes)))
        ago = {31236: 3395, 31237: 3700}.get(port, -1000)  # as if a slow machine were a fast one
        os.utime(path, (0, time.time() - ago))
    monkeypatch.setattr(state_reader, "shown_forest", lambda path: FOREST)
    path, every = Path(__file__).with_name("ran.txt"), []
    for line, code, said in commands(path, "100"):
        every += [line, *([] if code == 0 else [f"exit code {code}"]), said]
    varies = "in [0-9.]+ s: | · [0-9]{2}:[0-9]{2}:[0-9]{2}|@.*[.]json|:[0-9]+/| +$"
    assert path.read_text() == re.sub(varies, "", "\n".join(every), flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "full"), 2, "cannot write the output: no space is left"),
        (ImportError("no x"), 2, "Error: no x; run 'deft doctor' for what is missing"),
        (OSError(errno.EIO, "broken"), None, ""),
    ],
)
def test_errors_that_a_command_does_not_expect(error, code, said, monkeypatch):
    monkeypatch.setattr("deft_backend.cli.views.state_folder", raising(error))
    if code is None:
        with pytest.raises(OSError, match="broken"):
            run("top", "--once")
        return
    found, _, err = run("top", "--once")
    assert (found, said in err) == (code, True)


def test_the_version():
    assert run("--version")[:2] == (0, f"deft-backend {VERSION}\n")


def test_serve_names_a_taken_port(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options in (["--port", str(port)], ["--", "--port", str(port)]):
            code, _, err = run("serve", "--host", installed_hosts()[0], "--model", model, *options)
            assert code == 2
            assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in err


def steps(number, reason=None):
    return {"kind": "decode", "reason": reason, "steps": number, "rows": 2, "kv_bytes": 5}


def state(**changes):
    made = make_state()
    content = {**made.as_json(made.counters()), "port": 31234, "policy": "deft-node"}
    content |= {"dtype": "float16", "dtype_bytes": 2, "num_layers": 4}
    content |= {"updated": time.time() + 1000, "compile_seconds": 0.0}
    content |= {"steps": [steps(9), steps(1, "small batch")], "kv_bytes_read": 1000}
    return content | changes


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_explain_plans_for_the_target_of_the_server(dtype, tmp_path):
    """The drawn groups are those of the planner that decodes."""
    path = state_path(tmp_path, 31234)
    size = getattr(torch, dtype).itemsize
    path.write_text(json.dumps(state(num_query_heads=16, dtype=dtype, dtype_bytes=size)))
    kinds = {"dtype": torch.float16, "kv_dtype": getattr(torch, dtype)}
    attention = tree_attention(num_query_heads=16, max_batch=4, page_size=16, **kinds)
    target = server_target(state_reader.read_state(path), 16)
    assert target == attention.target
    assert target.dtype_bytes == size
    assert target.costs.source == attention.target.costs.source


def test_the_page_is_up_to_date_and_short():
    """After a change of a command: ``python -m tools.cli_page``."""
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text
    assert len(text.split()) <= 1500


@pytest.mark.usefixtures("triton_cache")
def test_a_server_finds_its_kernels_in_the_folder(tmp_path):
    """Batches of two need few kernels."""
    folder = tmp_path / "kernels"
    arguments = "--heads 64/8 --tensor-parallel 2 --host sglang --max-batch 2 --target sm_90"
    environment = {"COLUMNS": "200", "DEFT_KERNEL_CACHE": str(folder)}
    code, out, err = run("warm", *arguments.split(), **environment)
    assert (code, err) == (0, "")
    assert "for sm_90: sglang, heads 32/4 of 128, " in out
    count = len(json.loads((folder / "manifest.json").read_text())["kernels"])
    assert f"{folder} holds {count} kernels" in out.replace("\n", "")
    assert f"{count} compiled on " in out
    server = DescribedServer("sglang", 32, 4, 128, torch.bfloat16, 1, 2)
    wanted = server.variants(Gpu.named("sm_90"), Settings())
    assert count == len(wanted)
    with compiling_for(90):
        assert take(folder, Origin.of("sm_90")) == Taken(copied=count, held=0, damaged=0)
        done = compile_all(wanted)
    assert (done.compiled, done.cached) == (0, count)
