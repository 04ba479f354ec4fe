"""Prometheus scrapes a real server of the installed host: the dashboard's queries have data."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deft_backend.tools.servers.command import free_port, installed_hosts, server_command
from deft_backend.tools.servers.process import ServerProcess
from prometheus_server import dashboard_queries, program, prometheus

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "tiny-llama")


def send(url, together):
    """Ask six questions about two texts, `together` at a time."""

    def ask(number):
        prompt = " ".join(f"w{number % 2 + word}" for word in range(300))
        body = {"model": MODEL, "prompt": f"{prompt} w{number}", "max_tokens": 12}
        body |= {"temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 12

    with ThreadPoolExecutor(together) as threads:
        list(threads.map(ask, range(6)))


@pytest.mark.rare
def test_the_dashboard_shows_a_real_server(tmp_path):
    program("prometheus")
    host = installed_hosts()[0]
    command = server_command(
        MODEL,
        free_port(),
        host=host,
        environment={"DEFT_CACHE_DIR": str(tmp_path / "cache")},
        host_arguments=["--enable-metrics"] if host == "sglang" else [],
    )
    queries = dashboard_queries()
    # This server does not speculate. The rates of an idle moment must not hide a missing series.
    del queries["Acceptance length A"]
    with (
        ServerProcess(command, tmp_path / "server.log") as server,
        prometheus([f"127.0.0.1:{command.port}"], tmp_path) as running,
    ):
        for seed in range(2):
            # Unequal branches: some steps decode one request, on the host's kernel.
            send(server.url, together=5 - 4 * seed)
        answers = running.wait(queries)
        assert not [name for name, series in answers.items() if not series]
        (saved,) = answers["KV reads saved A"]
        assert 0 < float(saved["value"][1]) < 1
        reasons = {
            s["metric"]["reason"] for s in answers["Steps on the host's kernel, by reason A"]
        }
        assert "batch smaller than DEFT_MIN_BATCH=2" in reasons
