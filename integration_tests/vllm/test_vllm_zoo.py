"""Windows beside full attention, sinks, linear layers and experts, on vLLM."""

import pytest

from integration_tests.common.zoo import check_architectures


@pytest.mark.rare
@pytest.mark.timeout(900)
def test_every_token_of_every_architecture_is_the_hosts(tmp_path):
    check_architectures("vllm", tmp_path)
