"""On a Hopper GPU: with an MLA model, every token of vLLM is that of its own backend."""

import pytest

from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.gpu.latent_variants import SHAPES, check, fleet, served
from integration_tests.gpu.vllm_variants import COMMON

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these servers run on a GPU")

FLEET = fleet("vllm", COMMON, "FLASH_ATTN_MLA")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_is_the_hosts(shape, tmp_path):
    with served(FLEET, shape, tmp_path) as (pair, model):
        check(FLEET, shape, pair, model)
