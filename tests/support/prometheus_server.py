"""A real Prometheus that scrapes given addresses, and the queries of deploy/."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from deft_backend.tools.servers.command import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"


def program(name):
    """The path of `prometheus` or `promtool`; without it, the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing (Debian: apt-get install prometheus)")
    return found


def dashboard_queries():
    """Every query of the dashboard, by panel and letter, with Grafana's variables filled in."""
    panels = json.loads((DEPLOY / "grafana" / "deft.json").read_text())["panels"]
    filled = {"$__rate_interval": "1m", "$__range": "1m", "$instance": ".*"}
    queries = {}
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in filled.items():
                query = query.replace(name, value)
            assert "$" not in query, f"a variable that the test does not fill: {query}"
            queries[f"{panel['title']} {target['refId']}"] = query
    return queries


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port):
        self._url = f"http://127.0.0.1:{port}"

    def query(self, query):
        """The series that an instant query returns."""
        address = f"{self._url}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(address, timeout=10) as response:
            return json.load(response)["data"]["result"]

    def wait(self, queries, seconds=30.0):
        """The answers to all queries, as soon as each has data, or at the end of `seconds`."""
        end = time.monotonic() + seconds
        while True:
            try:
                answers = {name: self.query(query) for name, query in queries.items()}
                if all(answers.values()) or time.monotonic() > end:
                    return answers
            except (urllib.error.URLError, OSError):
                if time.monotonic() > end:
                    raise
            time.sleep(0.5)


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
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(15)
