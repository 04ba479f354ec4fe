"""Manifests fit each other and allow a long first start; Prometheus and the router find them."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
START_SECONDS = 600
"""A first start that loads a model, compiles every kernel and captures graphs takes less."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_deployment_and_its_service_fit_and_prometheus_finds_the_pods(path):
    """The scrape configuration keeps exactly our pods' labels and port."""
    documents = {found["kind"]: found for found in yaml.safe_load_all(path.read_text())}
    deployment, service = documents["Deployment"], documents["Service"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert {each["targetPort"] for each in service["spec"]["ports"]} == {port["name"]}
    assert {each["name"] for each in service["spec"]["ports"]} == {"http", "metrics"}
    dockerfile = (DEPLOY / "docker" / f"{path.stem}.Dockerfile").read_text()
    assert f"EXPOSE {port['containerPort']}\n" in dockerfile

    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= START_SECONDS
    assert "livenessProbe" in container
    assert "readinessProbe" in container

    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())[
        "scrape_configs"
    ]
    known = {"__meta_kubernetes_pod_container_port_name": port["name"]}
    for name, value in labels.items():
        known["__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", name)] = value
    for rule in job["relabel_configs"]:
        (source,) = rule["source_labels"]
        assert source in known
        if rule.get("action") == "keep":
            assert re.fullmatch(rule["regex"], known[source])


def test_the_router_knows_every_replica():
    services = yaml.safe_load((DEPLOY / "compose" / "sglang-router.yml").read_text())["services"]
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
    assert all(services[name]["image"].startswith("deft-sglang:") for name in replicas)
