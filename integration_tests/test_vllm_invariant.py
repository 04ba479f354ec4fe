"""vLLM's batch-invariant mode: log-probabilities of a request have the same bits in any batch."""

import pytest

from integration_tests.common.answers import PREFIX, TOPICS, on
from integration_tests.common.server import Ask, ask_to

pytest.importorskip("vllm.model_executor.determinism")  # what the tests' CPU backend replaces


def bits(answers):
    return [(a.token_texts, a.logprobs, a.likeliest) for choices in answers for a in choices]


@on("invariant")
def test_a_request_alone_and_in_batches(server):
    """Shared prefixes, equal prompts and others; with and without cached prefixes."""
    lengths = (97, 113, 161, 200, 40, 31)
    asks = [
        Ask(PREFIX[:length] + topic * (at % 2), tokens=10, logprobs=5)
        for at, (topic, length) in enumerate(zip(TOPICS, lengths, strict=True))
    ]
    alone = []
    for ask in asks:
        assert ask_to(server, "reset_prefix_cache") == 200
        alone += bits(server.complete([ask]))
    for order in (asks, [*asks[::-1], *asks[3:]], [*asks[1:], *asks]):
        found = dict(zip(order, bits(server.complete(order)), strict=True))
        assert [found[ask] for ask in asks] == alone
    assert ask_to(server, "reset_prefix_cache") == 200
    assert bits(server.complete(asks)) == alone
    state = server.state()
    assert state["policy"] == "invariant"
    assert not state["steps_host"]
    assert {row["kind"] for row in state["steps"]} == {"decode", "mixed"}
    assert not server.trouble()
