"""The tokens that the verifications of a server give, as its pages tell them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from deft_backend.tools.harness.server_counters import acceptance_length

PAGES = {}


@pytest.fixture
def url():
    """A server of `PAGES`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path in PAGES else 404)
            self.end_headers()
            self.wfile.write(PAGES.get(self.path, "").encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    PAGES.clear()


def test_acceptance_of_vllm_is_summed_over_its_engines(url):
    assert acceptance_length(url) is None
    lines = ["# HELP vllm:spec_decode_num_drafts_total Drafts"]
    for engine, drafts, accepted in ((0, "10.0", "15.0"), (1, "30.0", "5.0")):
        lines.append(f'vllm:spec_decode_num_drafts_total{{engine="{engine}"}} {drafts}')
        lines.append(f'vllm:spec_decode_num_draft_tokens_total{{engine="{engine}"}} 160.0')
        lines.append(f'vllm:spec_decode_num_accepted_tokens_total{{engine="{engine}"}} {accepted}')
        lines.append(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}"}} 99.0'
        )
    PAGES["/metrics"] = "\n".join(lines)
    assert acceptance_length(url) == 1.5
    PAGES["/metrics"] = "vllm:spec_decode_num_drafts_total 0.0"
    assert acceptance_length(url) is None


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([{"avg_spec_accept_length": 2.5}, {"avg_spec_accept_length": 3.5}], 3.0),
        ([{"avg_spec_accept_length": 2.5}, {}], 2.5),
        ([{}], None),
    ],
)
def test_acceptance_of_sglang_is_its_engines_average(url, states, expected):
    PAGES["/server_info"] = json.dumps({"internal_states": states})
    assert acceptance_length(url) == expected
    PAGES["/server_info"] = "not JSON"
    assert acceptance_length(url) is None


def test_a_server_that_does_not_answer_has_no_acceptance():
    assert acceptance_length("http://127.0.0.1:9") is None
