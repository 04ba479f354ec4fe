"""Architectures of the zoo on a host's CPU engine: every token is the host's own."""

from integration_tests.zoo.run import ARCHITECTURES, Place, run

SECONDS = 800.0


def check_architectures(host, folder):
    """Run the host's architectures for tests; `python -m integration_tests.zoo` runs the others."""
    names = [name for name, architecture in ARCHITECTURES.items() if host in architecture.ci]
    assert names
    rows = list(run(names, Place(host, gpu=False), folder, 1, SECONDS))
    assert [row["architecture"] for row in rows] == names
    for row in rows:
        architecture = ARCHITECTURES[row["architecture"]]
        assert row["tokens_checked"], row
        assert not row["tokens_wrong"], row
        assert row["ties"] <= row["tokens_checked"] // 10, row
        assert row["layers_tree"] == architecture.tree, row
