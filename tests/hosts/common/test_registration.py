"""A host loads the plugin in every process: one that is not asked for costs next to nothing."""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from failure_lines import raising

# What each host has imported when it loads its plugins.
HOSTS = {
    "sglang": ("sglang.srt.server_args", "sglang.srt.plugins"),
    "vllm": ("vllm.platforms", "vllm.v1.attention.backends.registry", "vllm.plugins"),
}

REGISTER = """
import json, sys, time
from importlib import import_module

host, *modules = sys.argv[1:]
sys.argv = ["server", "--attention-backend", "triton"]
for module in modules:
    import_module(module)
before, began = set(sys.modules), time.process_time()
import_module(f"deft_backend.hosts.{host}.plugin").register()
spent = time.process_time() - began
added = sorted(set(sys.modules) - before)
names, hooks = ["deft", "DEFT"], ["sglang.srt.server_args.ServerArgs.method"]
if host == "sglang":
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES
    names = [name for name in ATTENTION_BACKEND_CHOICES if name.lower() == "deft"]
    hooks = [*HookRegistry._hooks]
print(json.dumps({"seconds": spent, "added": added, "names": names, "hooks": hooks}))
"""


@pytest.mark.parametrize("host", HOSTS)
def test_registration_takes_no_second_and_loads_no_kernel(host, tmp_path):
    """CPU time, which other programs on the machine hardly change."""
    if find_spec(host) is None:
        pytest.skip(f"{host} is not installed")
    command = [sys.executable, "-c", REGISTER, host, *HOSTS[host]]
    folder = tmp_path / "cache"
    where = {**os.environ, "DEFT_CACHE_DIR": str(folder)}
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seconds"] < 1.0
    assert found["names"] == ["deft", "DEFT"]
    (hook,) = found["hooks"]
    assert hook.startswith("sglang.srt.server_args.ServerArgs.")
    assert "deft:" not in done.stderr
    assert not folder.exists()
    ours = [name for name in found["added"] if name.split(".")[0] == "deft_backend"]
    assert 5 <= len(ours) <= 40
    rooms = {name.split(".")[1] for name in ours if "." in name}
    assert rooms <= {"files", "forest", "hosts", "settings", "shapes", "telemetry"}


@pytest.mark.parametrize("host", HOSTS)
def test_registering_never_raises(host, monkeypatch, caplog):
    """Wherever the plugin is loaded: its module imports no host."""
    plugin = import_module(f"deft_backend.hosts.{host}.plugin")
    monkeypatch.setattr(plugin, "_register", raising(RuntimeError("a host from another planet")))
    plugin.register()
    assert "a host from another planet" in caplog.text
