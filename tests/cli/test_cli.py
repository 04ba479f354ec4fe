"""The `deft` command: help, one-line errors for bad input, explain and doctor end to end."""

import errno
import json
import re
import shlex
import socket
import time
from pathlib import Path

import pytest
import torch

from attention_checks import tree_attention
from commands import run
from deft_backend.cli import ab_run
from deft_backend.forest import build_forest
from deft_backend.settings.version import VERSION
from deft_backend.telemetry import state_reader
from deft_backend.telemetry.state_reader import read_state
from deft_backend.tools.servers.command import installed_hosts, server_command, use_gpu
from failure_lines import raising
from sglang_fakes import make_state
from state_files import state_path

FOREST = build_forest([0, 1], [100], [110, 120])


def refused(*arguments, **environment):
    """What a command says that cannot start its work."""
    code, _, err = run(*arguments, **environment)
    assert code == 2
    return err


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config["max_position_embeddings"] = 8192
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    return str(folder)


@pytest.fixture
def no_server(monkeypatch):
    """The command refuses bad input before any server starts."""

    def started(*arguments, **named):
        raise AssertionError("a server would have been started")

    monkeypatch.setattr(ab_run, "compare", started)


@pytest.mark.usefixtures("no_server")
def test_refusals_are_as_drawn(model, tmp_path):
    """The file has each command, and the words of its refusal. A refusal leaves no file."""
    path = Path(__file__).with_name("refused.txt")
    text, cache = path.read_text(), str(tmp_path / "cache")
    every = []
    for line in text.splitlines():
        if line.startswith("$ deft "):
            words = shlex.split(line.replace("MODEL", model))[2:]
            said = refused(*words, DEFT_CACHE_DIR=cache).replace(model, "MODEL")
            every += [line, " ".join(re.sub("[─╭╮╰╯│]", "", said).split())]
    assert list(tmp_path.iterdir()) == [Path(model)]
    assert text == "\n".join(every) + "\n"


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


def test_serve_names_every_wrong_setting_and_a_taken_port(model, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options in (["--port", str(port)], ["--", "--port", str(port)]):
            err = refused("serve", "--host", installed_hosts()[0], "--model", model, *options)
            assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in err
    monkeypatch.setenv("DEFT_POLICY", "foo")
    monkeypatch.setenv("DEFT_MIN_BATCH", "0")
    for command in ("serve", "ab"):
        err = refused(command, "--model", model)
        assert "DEFT_POLICY is 'foo'" in err
        assert "DEFT_MIN_BATCH is '0'" in err


@pytest.mark.parametrize("host", ["sglang", "vllm"])
def test_serve_prints_the_command_it_would_run(host, model):
    given = ["--policy", "fasttree", "--port", "1234", "--", "--page-size", "16"]
    code, out, _ = run("serve", "--dry-run", "--host", host, "--model", model, *given)
    would = {"policy": "fasttree", "host_arguments": given[5:], "gpu": use_gpu(), "host": host}
    assert (code, server_command(model, 1234, **would).shell() in out) == (0, True)


def steps(number, reason=None):
    return {"kind": "decode", "reason": reason, "steps": number, "rows": 2, "kv_bytes": 5}


def state(**changes):
    made = make_state()
    content = {**made.as_json(made.counters()), "port": 31234, "policy": "deft-node"}
    content |= {"dtype": "float16", "dtype_bytes": 2, "num_layers": 4, "updated": time.time()}
    content |= {"steps": [steps(9), steps(1, "small batch")], "kv_bytes_read": 1000}
    return content | changes


def test_explain_reads_a_running_server(tmp_path, monkeypatch):
    monkeypatch.setattr(state_reader, "shown_forest", lambda path: FOREST)
    state_path(tmp_path / "servers", 31234).write_text(json.dumps(state()))
    ended = state_path(tmp_path / "servers", 31235, pid=2**22 + 1)  # no such process
    ended.write_text(json.dumps(state()))
    for port in (["31234"], []):
        code, out, _ = run("explain", "--server", *port, "--json", DEFT_CACHE_DIR=str(tmp_path))
        assert code == 0
        content = json.loads(out)
        assert content["policy"] == "deft-node"
        assert content["tokens_stored"] == FOREST.tokens_stored
        assert content["kv_bytes"] == FOREST.tokens_stored * 2 * 2 * 64 * 2 * 4


def test_explain_cuts_the_chunks_of_the_servers_policy_invariant(tmp_path, monkeypatch):
    monkeypatch.setattr(state_reader, "shown_forest", lambda path: build_forest([0], [], [1000]))
    content = state(policy="invariant", chunk_tokens=128)
    state_path(tmp_path / "servers", 31234).write_text(json.dumps(content))
    for asked in ([], ["--policy", "invariant"]):
        code, out, _ = run("explain", "--server", *asked, "--json", DEFT_CACHE_DIR=str(tmp_path))
        assert code == 0
        groups = json.loads(out)["groups"]
        assert [group["tokens"] for group in groups] == [128] * 7 + [104]


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_explain_plans_for_the_target_of_the_server(dtype, tmp_path):
    """The drawn groups are those of the planner that decodes."""
    from deft_backend.tools.explain import server_target

    path = state_path(tmp_path, 31234)
    size = getattr(torch, dtype).itemsize
    path.write_text(json.dumps(state(num_query_heads=16, dtype=dtype, dtype_bytes=size)))
    kinds = {"dtype": torch.float16, "kv_dtype": getattr(torch, dtype)}
    attention = tree_attention(num_query_heads=16, max_batch=4, page_size=16, **kinds)
    target = server_target(read_state(path), 16)
    assert target == attention.target
    assert target.dtype_bytes == size
    assert target.costs.source == attention.target.costs.source


@pytest.mark.parametrize("kind", ["quick", "urls"])
def test_a_report_that_cannot_be_written_is_said_before_the_run(kind, tmp_path, monkeypatch):
    from deft_backend.cli.ab_run import make_report_folder

    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr("deft_backend.cli.ab_run.both_answer", lambda urls: None)
    options = ["--quick"] if kind == "quick" else ["--urls", "127.0.0.1:9", "127.0.0.1:9"]
    err = refused("ab", *options, "--out", str(file))
    assert f"cannot write the report into {file}: File exists" in err
    make_report_folder(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
