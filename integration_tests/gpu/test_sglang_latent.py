"""On a Hopper GPU: with an MLA model, every token of SGLang is that of its own backend."""

import pytest

from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.gpu.latent_variants import SHAPES, check, fleet, served
from integration_tests.gpu.sglang_variants import COMMON

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these servers run on a GPU")

FLEET = fleet("sglang", COMMON, "fa3")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_is_the_hosts(shape, tmp_path):
    with served(FLEET, shape, tmp_path) as (pair, model):
        check(FLEET, shape, pair, model)


def test_chains_of_drafts(tmp_path):
    """Four query tokens of eight heads fill half of a tile. The model drafts for itself."""
    chains = (
        "--speculative-algorithm", "STANDALONE",
        "--speculative-draft-model-path", str(tmp_path / "model"), "--speculative-num-steps", "3",
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
    )  # fmt: skip
    servers = fleet("sglang", COMMON, "fa3", chains)
    with served(servers, "latent-8", tmp_path) as (pair, model):
        check(servers, "latent-8", pair, model, fewest=20)
        assert pair[0].state()["verified_tokens"] > 0
