"""The compose file: every replica is a service of its own, which the router knows."""

import re
from pathlib import Path

import pytest

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
