"""The `deft` command: help, one-line errors for bad input, explain and doctor end to end."""

import errno
import json
import re
import shlex
import socket
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attention_checks import tree_attention
from commands import run
from deft_backend.attention import self_check
from deft_backend.attention.self_check import Case, Outcome
from deft_backend.cli import ab_run, checks
from deft_backend.cli.doctor import _next_step
from deft_backend.forest import build_forest
from deft_backend.settings.version import VERSION
from deft_backend.telemetry import state_reader
from deft_backend.telemetry.state_reader import read_state
from deft_backend.tools.servers.command import installed_hosts, server_command, use_gpu
from drawings import check_drawn
from failure_lines import raising
from sglang_fakes import make_state
from state_files import state_path

FOREST = build_forest([0, 1], [100], [110, 120])


def refused(*arguments, **environment):
    """What a command says that cannot start its work."""
    code, _, err = run(*arguments, **environment)
    assert code == 2
    return err


def install(monkeypatch, versions):
    """Make exactly these distributions appear installed, in these versions."""

    def version(name):
        found = versions.get(name)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)


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


def test_doctor_json(model):
    code, out, _ = run("doctor", "--json", "--model", model)
    content = json.loads(out)
    found = [check for part in ("installed", "machine", "settings") for check in content[part]]
    assert {"python", "torch", "sglang", "plugin", "DEFT_POLICY"} <= {c["subject"] for c in found}
    assert content["works"] == all(check["status"] != "problem" for check in found)
    assert code == (0 if content["works"] else 1)
    assert all(check["remedy"] for check in found if check["status"] == "problem")
    (kernel,) = content["kernels"]
    assert (kernel["heads"], kernel["head_dim"], kernel["dtype"]) == ("4/2", 64, "float16")
    config = Path(model) / "config.json"
    config.write_text(
        config.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 7')
    )
    (kernel,) = json.loads(run("doctor", "--model", model, "--json")[1])["kernels"]
    assert (kernel["kernel"], "7 query heads" in kernel["why"]) == ("host", True)


def test_doctor_runs_the_kernels_and_fails_with_them(monkeypatch):
    def found(shapes, device, until):
        assert len(shapes) == 4  # two shapes, each with caches of 16 and of 8 bits
        assert 8 < until - time.monotonic() <= 18  # 2 of 20 s are for what is around the cases
        yield shapes[0], Outcome(Case(on_device=False), 3e-4)
        yield shapes[0], Outcome(Case(on_device=True), 2.0, "row 3 is off by 2")
        yield shapes[1], Outcome(Case(on_device=True, query_tokens=4), None)

    monkeypatch.setattr(self_check, "check_shapes", found)
    code, out, _ = run("doctor", "--check", COLUMNS="200")
    assert code == 1
    shown = [line for line in out.splitlines() if "planned on the" in line]
    assert len(shown) == 3
    assert ["3.0e-04" in shown[0], "row 3 is off" in shown[1], "not run" in shown[2]] == 3 * [True]
    assert "No GPU here: the check ran the interpreter's kernels" in out
    assert "2 of 3 cases ran within 20 s; Triton's interpreter is slow on a busy machine" in out
    _, out, _ = run("doctor", "--check", "--json")
    content = json.loads(out)
    assert not content["works"]
    assert [entry["failure"] for entry in content["check"][:3]] == [None, "row 3 is off by 2", None]
    nothing = Outcome(Case(on_device=False), None)
    monkeypatch.setattr(self_check, "check_shapes", lambda shapes, *_: [(shapes[0], nothing)])
    code, out, _ = run("doctor", "--check", COLUMNS="200")
    assert (code, "no case of --check ran" in out) == (1, True)


def test_doctor_without_a_case_that_ran_knows_nothing(monkeypatch):
    monkeypatch.setattr(
        self_check,
        "check_shapes",
        lambda shapes, *rest: [(shapes[0], Outcome(Case(on_device=False), None))],
    )
    code, out, _ = run("doctor", "--check", COLUMNS="200")
    assert (code, "no case of --check ran" in out) == (1, True)


def test_doctor_recommends_what_runs_here(monkeypatch):
    """Outside a checkout there is no tiny model."""
    assert _next_step() == "try deft ab --quick, or deft serve"
    monkeypatch.setattr("deft_backend.cli.doctor.tiny_model", lambda: None)
    assert _next_step() == "try deft ab --quick --model M, or deft serve --model M"


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null/x"])
def test_doctor_tries_to_write_the_state_folder(folder, monkeypatch):
    monkeypatch.setenv("DEFT_CACHE_DIR", folder)
    found = {check.subject: check for check in checks.check_settings()}
    state = found["state folder"] if "state folder" in found else found["DEFT_CACHE_DIR"]
    assert state.status != "ok"
    assert state.remedy is not None


def test_doctor_finds_bad_settings():
    wrong = {"DEFT_POLICY": "best", "DEFT_POLCY": "auto", "DEFT_CACHE_DIR": "~nobody-there/x"}
    code, out, _ = run("doctor", "--json", **wrong, DEFT_PLANNER="device")
    assert code == 1
    found = {check["subject"]: check for check in json.loads(out)["settings"]}
    statuses = {name: found[name]["status"] for name in (*wrong, "DEFT_PLANNER")}
    assert statuses == dict.fromkeys(statuses, "problem") | {"DEFT_POLCY": "note"}
    assert "'~nobody-there/x'; expected a directory" in found["DEFT_CACHE_DIR"]["state"]
    _, shown, _ = run("doctor", **wrong)
    assert f"→ {found['DEFT_CACHE_DIR']['remedy']}" in shown


@pytest.mark.parametrize(
    ("variable", "loading", "others"),
    [
        ("SGLANG_PLUGINS", ("", "a, deft"), ("a", "a deft")),
        ("VLLM_PLUGINS", ("a,deft",), ("", "a, deft")),
    ],
)
def test_doctor_reads_plugin_lists_as_the_hosts_do(variable, loading, others, monkeypatch):
    (host,) = (host for host in checks.HOSTS if host.selection == variable)
    for value in (*loading, *others):
        monkeypatch.setenv(variable, value)
        assert host.leaves_us_out() is (value in others), value
    monkeypatch.delenv(variable)
    assert not host.leaves_us_out()


@pytest.mark.parametrize(
    ("version", "status"),
    [
        *[("0.5.16", "problem"), ("0.5.17", "ok"), ("0.5.17.post1", "ok"), ("0.5.23", "ok")],
        *[("0.5.24rc0", "problem"), (None, "problem")],
    ],
)
def test_doctor_compares_versions(version, status, monkeypatch):
    install(monkeypatch, {"sglang": version, "torch": "1.9", "triton": "99"})
    found = {check.subject: check.status for check in checks.check_packages()}
    assert [found[name] for name in ("sglang", "torch", "triton")] == [status, "problem", "note"]


MACHINES = {
    "SGLang of the window, on a GPU": (
        {"sglang": "0.5.17", "torch": "2.8", "triton": "4", "aiohttp": None, "deft-backend": "9"},
        {"has_nvidia_driver": True, "find_compiler": ["gcc", "-m64"], "cuda": "13", "sees": True},
    ),
    "the newest vLLM, without a GPU": (
        {"vllm": "0.33.1", "torch": "2.7", "triton": "3.4", "aiohttp": "3.8"},
        {"find_compiler": None, "num_gpus": 0},
    ),
    "no host": (
        {"torch": "3", "triton": None, "aiohttp": "3.9"},
        {
            "ensure_driver_stub": Path("/stub"),
            "loading_fails": "noexec",
            "find_compiler": None,
            "sees": True,
        },
    ),
    "another SGLang": (
        {"sglang": "0.6", "torch": "2.99", "triton": "3.3"},
        {
            "ensure_driver_stub": Path("/stub"),
            "loading_fails": None,
            "write_fails": "full",
            "cuda": "13",
        },
    ),
}


def findings(monkeypatch):
    """Every finding of `deft doctor` on these machines, a line each."""
    usual = {
        "has_nvidia_driver": False,
        "num_gpus": 1,
        "write_fails": None,
        "find_compiler": ["gcc"],
    }
    usual |= {"ensure_driver_stub": Path("/stub"), "loading_fails": None}
    monkeypatch.setattr("platform.python_version", lambda: "3.12.0")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(torch, "__version__", "2.9")
    point = SimpleNamespace(value="deft:register", load=lambda: None)
    broken = SimpleNamespace(value="old:register", load=lambda: point.nothing)
    for name, (versions, machine) in MACHINES.items():
        yield f"# {name}"
        install(monkeypatch, versions)
        answers = usual | machine
        sees = answers.pop("sees", False)
        monkeypatch.setattr(torch.version, "cuda", answers.pop("cuda", None))
        monkeypatch.setattr(torch.cuda, "is_available", lambda sees=sees: sees)
        for function, found in answers.items():
            monkeypatch.setattr(checks, function, lambda *_, found=found: found)
        points = {"no host": [point, broken], "another SGLang": []}.get(name, [point])
        monkeypatch.setattr(checks, "entry_points", lambda points=points, **_: points)
        monkeypatch.setenv("DEFT_UNTESTED_HOST", "1" if "sglang" in versions else "")
        every = (checks.check_packages, checks.check_entry_point, checks.check_device)
        for check in (check for of in (*every, checks.check_settings) for check in of()):
            remedy = "" if check.remedy is None else f" → {check.remedy}"
            yield f"{check.subject}: {check.status}: {check.state}{remedy}"


def test_the_findings_of_doctor_are_as_drawn(monkeypatch):
    monkeypatch.setenv("DEFT_CACHE_DIR", "/cache")
    monkeypatch.setenv("VLLM_PLUGINS", "a, b")
    monkeypatch.setenv("DEFT_FALLBACK_BACKEND", "fa3")
    text = "\n".join(findings(monkeypatch)).replace(VERSION, "VERSION")
    check_drawn(f"{text}\n", Path(__file__).with_name("doctor.txt"))
