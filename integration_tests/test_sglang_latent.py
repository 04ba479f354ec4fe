"""A model with multi-head latent attention (MLA): every token is that of the model itself."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from integration_tests.common.answers import PREFIX, TOPICS, check
from integration_tests.common.plain_model import PlainModel
from integration_tests.common.server import EAGER, MODEL, Ask, Group
from integration_tests.hosts import GROUPS, running

pytestmark = pytest.mark.xdist_group("latent")

CONFIG = Path(__file__).with_name("latent_config.json")
"""A small MiniCPM3. SGLang computes its attention over latent vectors on the CPU."""


def write_checkpoint(folder):
    """Random weights, so large that answers depend on every part of the KV cache."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.md"))
    shutil.copy(CONFIG, folder / "config.json")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    random = torch.Generator().manual_seed(0)
    for weight in (each for each in model.parameters() if each.ndim == 2):
        torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5, generator=random)
    with torch.no_grad():
        model.lm_head.weight[128:] = 0  # half of a character has no text of its own
    model.save_pretrained(folder)


SERVERS = {
    "decode": Group(settings=EAGER),
    "two-ranks": GROUPS["two-ranks"],
    "chains": GROUPS["chain"],
}


@pytest.fixture(scope="module", params=SERVERS)
def latent(request, tmp_path_factory):
    """A server that decodes or verifies MLA over plans, and the model in PyTorch."""
    folder = tmp_path_factory.mktemp("latent")
    write_checkpoint(folder / "model")
    group = SERVERS[request.param]
    settings = {**group.settings, "DEFT_MLA": "1"}
    with running(
        "deft", replace(group, settings=settings, model=folder / "model"), folder / "run"
    ) as server:
        yield server, PlainModel(folder / "model"), request.param


def test_a_tree_of_requests(latent):
    """Two levels, several samples of a prompt, and requests that end one by one.

    They decode for more than 24 steps: the answer of the costs about a batch counts 8 batches
    later, and the first two may be about batches that still wait for requests.
    """
    server, model, kind = latent
    middle = [PREFIX + f"In the year of {topic} " * 3 for topic in TOPICS[:2]]
    asks = [
        Ask(m + f"they found {t}", 36 + 2 * i) for m in middle for i, t in enumerate(TOPICS[2:])
    ]
    check(server, model, [*asks, Ask(PREFIX + "It said:", n=3), Ask("Alone, from the first word.")])
    chains = kind == "chains"
    states = [server.state(rank) for rank in ("tp0", "tp1")[: 1 + (kind == "two-ranks")]]
    assert len({state["steps_tree"] for state in states}) == 1
    for state in states:
        assert state["steps_tree"] > 0
        # The costs of chains share no prompts as short as these: the library's tests do.
        assert (state["verified_tokens"] > 0) == chains
        assert chains or state["kv_bytes_read"] < state["kv_bytes_query_guided"]
