"""The compose file, and its router before two real servers."""

import re
import shutil
from pathlib import Path

import pytest

from benchmarks.replicas import Trace, measure
from deft_backend.tools.servers.command import installed_hosts

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose" / "sglang-router.yml"


def test_the_router_knows_every_replica():
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    (command,) = services["router"]["command"]
    replicas = {name for name in services if name != "router"}
    assert set(re.findall(r"http://([\w-]+):30000", command)) == replicas
    assert set(services["router"]["depends_on"]) == replicas
    assert "--policy cache_aware" in command
    devices = [
        services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in replicas
    ]
    assert len({tuple(ids) for ids in devices}) == len(replicas), "two replicas share a GPU"
    for name in replicas:
        assert (ROOT / "deploy" / "docker" / "sglang.Dockerfile").is_file()
        assert services[name]["image"].startswith("deft-sglang:")


@pytest.mark.rare
def test_a_router_by_prefix_keeps_the_saving_of_one_server():
    host = installed_hosts()[0]
    program = f"{host}-router"
    if shutil.which(program) is None:
        pytest.skip(f"{program} is missing: `pip install {program}`")
    trace = Trace(prefixes=6, branches=4, together=8)
    model = str(ROOT / "models" / "tiny-llama")
    rows = list(measure(host, program, ["round_robin", "cache_aware"], model, trace))
    alone, in_turns, by_prefix = (row["read_share"] for row in rows)
    assert by_prefix < in_turns
    assert by_prefix == pytest.approx(alone, abs=0.1)
    assert all(steps for steps in rows[2]["steps_tree"]), "one replica got no request"
