"""Servers that speculate, from outside: the hosts' options, and the tokens that they accept."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import typer

from deft_backend.cli import models
from deft_backend.cli.ab_run import Drafting
from deft_backend.tools.servers.model_files import ModelFilesError
from deft_backend.tools.servers.speculation import acceptance_length, speculative_arguments

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


def test_each_host_gets_its_own_options():
    found = " ".join(speculative_arguments("sglang", "a/draft", 3))
    assert "--speculative-algorithm STANDALONE --speculative-draft-model-path a/draft" in found
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1" in found
    assert found.endswith("--speculative-num-draft-tokens 4")
    found = speculative_arguments("sglang", "ngram", 7)
    assert found == ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]
    option, value = speculative_arguments("vllm", "a/draft", 3)
    assert option == "--speculative-config"
    assert json.loads(value) == {"model": "a/draft", "num_speculative_tokens": 3}


def test_the_users_own_options_come_last():
    extra = ["--speculative-num-steps", "2"]
    found = Drafting("ngram", None).arguments("sglang", extra)
    assert found == [*speculative_arguments("sglang", "ngram", 4), *extra]
    assert Drafting(None, None).arguments("vllm", extra) == extra


@pytest.mark.parametrize("host", ["sglang", "vllm"])
@pytest.mark.parametrize("draft", ["", " ", "NGRAM", "eagle", "/no/such/folder"])
def test_what_drafts_nothing_is_refused_before_a_server_starts(host, draft, monkeypatch, capsys):
    def look_up(model, name, revision):
        raise ModelFilesError(f"the hub has no model {model}")

    monkeypatch.setattr(models, "model_file", look_up)
    with pytest.raises(typer.Exit) as stopped:
        Drafting(draft, None).arguments(host, [])
    assert stopped.value.exit_code == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"--speculative is {draft!r}; expected 'ngram', or a draft model's folder" in said


def test_a_draft_model_that_exists_is_taken(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert str(tmp_path) in Drafting(str(tmp_path), None).arguments("sglang", [])
    assert "s3://a/b" in Drafting("s3://a/b", None).arguments("sglang", [])  # the host can tell


def test_a_number_of_drafts_needs_speculation(capsys):
    with pytest.raises(typer.Exit):
        Drafting(None, 3).check()
    assert "--draft-tokens belongs to --speculative" in capsys.readouterr().err
