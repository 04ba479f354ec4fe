"""Windows beside full attention, sinks, linear layers and experts, on vLLM."""

import pytest

from integration_tests.zoo.run import ARCHITECTURES, Place, run


@pytest.mark.rare
@pytest.mark.timeout(900)
def test_every_token_of_every_architecture_is_the_hosts(tmp_path):
    """Those for tests; `python -m integration_tests.zoo` runs the others."""
    names = [name for name, architecture in ARCHITECTURES.items() if architecture.in_tests]
    rows = list(run(names, Place("vllm", gpu=False), tmp_path, 1, 800.0))
    assert [row["architecture"] for row in rows] == names
    for row in rows:
        assert row["tokens_checked"], row
        assert not row["tokens_wrong"], row
        assert row["ties"] <= row["tokens_checked"] // 10, row
        assert row["layers_tree"] == ARCHITECTURES[row["architecture"]].tree, row
