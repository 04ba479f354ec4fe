"""The tokens that the verifications of a server give, as its pages tell them."""

import json

import pytest

from deft_backend.tools.harness import server_counters
from deft_backend.tools.harness.server_counters import acceptance_length


@pytest.fixture
def pages(monkeypatch):
    """What the server answers, by path."""
    found = {}
    monkeypatch.setattr(server_counters, "get_page", lambda url: found.get(url.removeprefix("U")))
    return found


def test_acceptance_of_vllm_is_summed_over_its_engines(pages):
    assert acceptance_length("U") is None
    lines = ["# HELP vllm:spec_decode_num_drafts_total Drafts"]
    for engine, drafts, accepted in ((0, "10.0", "15.0"), (1, "30.0", "5.0")):
        lines.append(f'vllm:spec_decode_num_drafts_total{{engine="{engine}"}} {drafts}')
        lines.append(f'vllm:spec_decode_num_draft_tokens_total{{engine="{engine}"}} 160.0')
        lines.append(f'vllm:spec_decode_num_accepted_tokens_total{{engine="{engine}"}} {accepted}')
        lines.append(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}"}} 99.0'
        )
    pages["/metrics"] = "\n".join(lines)
    assert acceptance_length("U") == 1.5
    pages["/metrics"] = "vllm:spec_decode_num_drafts_total 0.0"
    assert acceptance_length("U") is None


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([{"avg_spec_accept_length": 2.5}, {"avg_spec_accept_length": 3.5}], 3.0),
        ([{"avg_spec_accept_length": 2.5}, {}], 2.5),
        ([{}], None),
    ],
)
def test_acceptance_of_sglang_is_its_engines_average(pages, states, expected):
    pages["/server_info"] = json.dumps({"internal_states": states})
    assert acceptance_length("U") == expected
    pages["/server_info"] = "not JSON"
    assert acceptance_length("U") is None


def test_a_server_that_does_not_answer_has_no_acceptance():
    assert acceptance_length("http://127.0.0.1:9") is None
