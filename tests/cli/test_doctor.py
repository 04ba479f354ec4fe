"""`deft doctor`: all that it prints, on machines of several kinds."""

import json
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from commands import run
from deft_backend import kernels
from deft_backend.attention import self_check
from deft_backend.cli import checks, doctor
from deft_backend.costs.cost_model import default_cost_model
from deft_backend.costs.table_lookup import TableInUse
from deft_backend.settings.version import VERSION
from drawings import check_drawn

SHIPPED = Path(kernels.__file__).parents[1] / "costs" / "shipped" / "h100-fp8.json"


def install(monkeypatch, versions):
    def version(name):
        found = versions.get(name)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null/x"])
def test_doctor_tries_to_write_the_state_folder(folder, monkeypatch):
    monkeypatch.setenv("DEFT_CACHE_DIR", folder)
    found = {check.subject: check for check in checks.check_settings()}
    state = found["state folder"] if "state folder" in found else found["DEFT_CACHE_DIR"]
    assert state.status != "ok"
    assert state.remedy is not None


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


MACHINES = json.loads(Path(__file__).with_name("machines.json").read_text())
"""Each has the command's words, the installed versions, what functions of `checks` return, and
variables; `errors`: the largest error that each case of `--check` finds, and why it fails."""


def on_a_gpu(monkeypatch, *, tuned):
    """Kernels and tables of a GPU: one shape is the host's, and each table has another origin."""
    used = TableInUse(default_cost_model(), Path("own.json") if tuned else SHIPPED, tuned)
    own = replace(used.model, source=json.loads(SHIPPED.read_text())["source"])
    tables = {
        "bfloat16": replace(used, notice="there is none for this GPU"),
        "float16": replace(used, model=own, notice="it is damaged"),
    }

    def configuration(head_dim, dtype, device, group):
        tiles = [SimpleNamespace(height=height) for height in (group, head_dim)]
        return SimpleNamespace(tiles=tiles, interpreted=dtype == torch.float16)

    def refused(query_heads, kv_heads, head_dim, dtype, device, *, kv_dtype=None):
        return "of 64 dimensions" if head_dim == 64 else None

    monkeypatch.setattr(doctor, "this_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(doctor, "table_of", lambda shape: (None, tables[shape.dtype]))
    monkeypatch.setattr(kernels, "kernel_configuration", configuration)
    monkeypatch.setattr(kernels, "unsupported", refused)


def printed(name, model, monkeypatch):
    given = MACHINES[name]
    monkeypatch.setattr("platform.python_version", lambda: "3.12.0")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(torch, "__version__", "2.9")
    monkeypatch.setattr(doctor, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    install(monkeypatch, given["versions"])
    answers = {"has_nvidia_driver": False, "num_gpus": 1, "write_fails": None}
    answers |= {"find_compiler": ["gcc"], "ensure_driver_stub": Path("/stub")}
    answers |= {"loading_fails": None, **given["machine"]}
    sees = answers.pop("sees", False)
    monkeypatch.setattr(torch.version, "cuda", answers.pop("cuda", None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    for function, found in answers.items():
        monkeypatch.setattr(checks, function, lambda *_, found=found: found)
    point = SimpleNamespace(value="deft:register", load=lambda: None)
    broken = SimpleNamespace(value="old:register", load=lambda: point.nothing)
    points = {"no host": [point, broken], "another SGLang": []}.get(name, [point])
    monkeypatch.setattr(checks, "entry_points", lambda **_: points)
    if name == "outside a checkout":
        monkeypatch.setattr(doctor, "tiny_model", lambda: None)
    if sees and name != "no host":
        on_a_gpu(monkeypatch, tuned=name == "outside a checkout")

    def check_shapes(shapes, device, until):
        assert (device, until) == (doctor.this_device(), 1018.0)
        for at, shape in enumerate(shapes):
            found = given["errors"][at % len(given["errors"])]
            yield shape, self_check.Outcome(self_check.Case(on_device=at > 0), *found)

    monkeypatch.setattr(self_check, "check_shapes", check_shapes)
    environment = {"DEFT_CACHE_DIR": "/cache", **given["environment"]}
    words = given["words"].replace("MODEL", model).split()
    code, out, err = run("doctor", *words, COLUMNS="250", **environment)
    assert err == ""
    return f"# {name}: exit code {code}\n{out}".replace(VERSION, "VERSION")


def test_what_doctor_prints_is_as_drawn(tmp_path, monkeypatch):
    config = {"num_attention_heads": 7, "num_key_value_heads": 2, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    every = []
    for name in MACHINES:
        with monkeypatch.context() as machine:
            every.append(printed(name, str(tmp_path), machine))
    text = re.sub(r" +$", "", "\n".join(every), flags=re.MULTILINE)
    check_drawn(text, Path(__file__).with_name("doctor.txt"))
