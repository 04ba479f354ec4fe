"""A real Prometheus scrapes the real exporter: every query of the dashboard and alerts has data."""

import json
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from counted_steps import host_step, tree_step
from deft_backend.telemetry.counters import DECODE, MIXED
from deft_backend.telemetry.metrics import register_states
from deft_backend.telemetry.state import StateWriter
from deft_backend.tools.servers.command import free_port
from sglang_fakes import make_state

client = pytest.importorskip("prometheus_client")

DEPLOY = Path(__file__).parents[2] / "deploy"
HEALTHY, FAILED = "healthy", "failed"


def program(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing (Debian: apt-get install prometheus)")
    return found


@contextmanager
def prometheus(addresses, folder):
    """Scrape `addresses` every second, with the alerts of deploy/ loaded."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "prometheus" / "alerts.yml")],
        "scrape_configs": [{"job_name": "deft", "static_configs": [{"targets": list(addresses)}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(15)


def decode(folder, healthy, ended):
    """Grow a server's counters ten times a second, through its own state file."""
    state = make_state()
    writer = StateWriter(state, folder)
    while not ended.wait(0.1):
        if healthy:
            for kind in (DECODE, MIXED):
                tree_step(state, tokens=100, loaded=40, kind=kind)
                state.planned[3] += 1_000_000  # nanoseconds of this plan
            host_step(state, "batch smaller than DEFT_MIN_BATCH=2", tokens=1)
        else:
            host_step(state, "kernel failed", tokens=100)
        writer.look()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """Two servers whose counters grow: one shares prefixes, the other's kernel failed."""
    program("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    ended, addresses, pages, threads = threading.Event(), {}, [], []
    for name in (HEALTHY, FAILED):
        states = folder / name
        states.mkdir(mode=0o700)
        registry = client.CollectorRegistry()
        register_states(states, 1, registry)
        # The host's own series of its page, which the panel "Batch" shows.
        client.Gauge("vllm:num_requests_running", "of the host", registry=registry).set(3)
        page, _ = client.start_http_server(0, "127.0.0.1", registry)
        pages.append(page)
        addresses[name] = f"127.0.0.1:{page.server_port}"
        threads.append(threading.Thread(target=decode, args=(states, name == HEALTHY, ended)))
        threads[-1].start()
    try:
        with prometheus(list(addresses.values()), folder) as running:
            yield running, addresses
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        for page in pages:
            page.shutdown()


def test_every_query_of_the_dashboard_has_data(scraped):
    """Rates settle after some scrapes; a busy machine may miss a few."""
    end = time.monotonic() + 90
    while True:
        try:
            return _check_dashboard(*scraped)
        except (AssertionError, ValueError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(2)


def _check_dashboard(url, addresses):
    panels = json.loads((DEPLOY / "grafana" / "deft.json").read_text())["panels"]
    filled, answers = {"$__rate_interval": "1m", "$__range": "1m", "$instance": ".*"}, {}
    for panel, target in ((each, target) for each in panels for target in each["targets"]):
        query = target["expr"]
        for name, value in filled.items():
            query = query.replace(name, value)
        assert "$" not in query, f"a variable that the test does not fill: {query}"
        address = f"{url}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(address, timeout=10) as response:
            answers[f"{panel['title']} {target['refId']}"] = json.load(response)["data"]["result"]
    assert not [query for query, series in answers.items() if not series]

    def value(panel, server, **labels):
        (found,) = (
            float(series["value"][1])
            for series in answers[f"{panel} A"]
            if {"instance": addresses[server], **labels}.items() <= series["metric"].items()
        )
        return found

    assert value("Share of KV read", HEALTHY) == pytest.approx(81 / 201, rel=0.1)
    assert value("Share of KV read", FAILED) == 1
    assert value("Share of steps through tree attention", HEALTHY) == pytest.approx(2 / 3, abs=0.1)
    assert value("Share of steps through tree attention", FAILED) == 0
    steps, share = "Steps, by kind and kernel", "Share of decoding through tree attention, by kind"
    pure, mixed = (value(steps, HEALTHY, kind=kind, kernel="tree") for kind in (DECODE, MIXED))
    assert mixed == pytest.approx(pure, rel=0.1)
    assert mixed > 0
    assert value(steps, HEALTHY, kind=MIXED, kernel="host") == 0
    assert value(steps, FAILED, kind=DECODE, kernel="host") > 0
    assert value(share, HEALTHY, kind=DECODE) == pytest.approx(100 / 101, abs=0.005)
    assert value(share, HEALTHY, kind=MIXED) == 1
    assert value(share, FAILED, kind=DECODE) == 0
    assert value("Planning time", HEALTHY) == pytest.approx(0.001, rel=0.1)
    assert value("Batch", HEALTHY) == 3


@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", DEPLOY / "prometheus" / "prometheus.yml"),
        ("test", "rules", Path(__file__).parent / "alerts.test.yml"),
    ],
    ids=["configuration", "alerts"],
)
def test_promtool_finds_no_fault(words):
    command = [program("promtool"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
