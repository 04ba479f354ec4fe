"""The example host in ``examples/page_table_engine``, and its page in the documentation."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="the example reads its model with safetensors")

from deft_backend.attention import TreeAttention
from examples.page_table_engine.engine import Engine
from examples.page_table_engine.model import Llama

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny-llama"

BELMORA = list(b"The town of Belmora stands on the river Isk. Its ruler is King Odo. ")
PROMPTS = [BELMORA + list(end) for end in (b"People of", b"The town of", b"Its ruler")]
DIGITS = list(b"Sort the digits 8 2 5 1.")


@pytest.fixture(scope="module")
def model():
    return Llama(MODEL, torch.float32, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _default_settings(monkeypatch):
    for name in ("DEFT_POLICY", "DEFT_VERIFY", "DEFT_MIN_BATCH"):
        monkeypatch.delenv(name, raising=False)


def drain(engine):
    answers = {}
    while not engine.is_idle:
        for request, token in engine.step():
            answers.setdefault(request, []).append(token)
    return answers


def traffic(engine):
    """The tokens of each step while requests join, share, fork, end and are aborted."""
    first, second = engine.add(PROMPTS[0], 9), engine.add(PROMPTS[1], 3)
    # The second request ends in the second of these steps.
    steps = [engine.step() for _ in range(3)]
    assert first in engine.running
    assert second not in engine.running
    # A fork: the first request's tokens so far, with another continuation. Its pages are shared.
    fork = engine.add([*engine.running[first].tokens, *b" and then"], 6)
    alone = engine.add(DIGITS, 8)
    steps += [engine.step() for _ in range(2)]
    again = engine.add(PROMPTS[0], 4)  # the same prompt again, in a row that was used before
    last = engine.add(PROMPTS[2], 5)
    engine.abort(alone)
    steps.append(engine.step())
    assert alone not in engine.running
    engine.abort(fork)
    engine.abort(fork)  # it has ended: no effect
    while not engine.is_idle:
        steps.append(engine.step())
    told = {request for step in steps for request, _ in step}
    assert told == {first, second, fork, alone, again, last}
    return steps


@pytest.fixture(scope="module")
def plain_steps(model):
    return traffic(Engine(model, num_pages=64, page_size=8, max_batch=4, attention="torch"))


def test_forward_agrees_with_transformers(model):
    transformers = pytest.importorskip("transformers", reason="compares with its Llama")
    reference = transformers.AutoModelForCausalLM.from_pretrained(MODEL).float().eval()
    engine = Engine(model, num_pages=64, page_size=8, max_batch=2, attention="torch")
    requests = [engine.add(PROMPTS[0], 12), engine.add(DIGITS, 12)]
    answers = drain(engine)
    for request, prompt in zip(requests, (PROMPTS[0], DIGITS), strict=True):
        tokens = torch.tensor([prompt])
        expected = reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False
        )
        assert answers[request] == expected[0, len(prompt) :].tolist()


def test_tree_attention_answers_token_for_token(model, plain_steps):
    engine = Engine(model, num_pages=64, page_size=8, max_batch=4)
    assert traffic(engine) == plain_steps
    counts = engine.state.counters()
    assert counts.steps_tree > 5
    assert 0 < counts.kv_bytes_read < counts.kv_bytes_query_guided
    # The last request, alone:
    assert set(counts.steps_host) == {"batch smaller than DEFT_MIN_BATCH=2"}
    assert counts.decode_steps <= len(plain_steps)


def test_graph_replays_read_the_static_buffers(model, monkeypatch):
    """With a stand-in for CUDA graphs: a replay repeats the captured forward."""
    plain = Engine(model, num_pages=64, page_size=8, max_batch=4, attention="torch")
    engine = Engine(model, num_pages=64, page_size=8, max_batch=4)
    decode, replays = engine._decode, []
    forward, calls = decode._forward, []

    def recorded(size):
        calls.append((size, forward(size)))
        return calls[-1][1]

    class Graph:
        def replay(self):
            replays.append(self.size)
            with torch.inference_mode():
                self.out.copy_(forward(self.size))

    @contextmanager
    def capture(graph, pool):
        yield
        graph.size, graph.out = calls[-1]

    for name, stand_in in (
        ("graph_pool_handle", object),
        ("synchronize", lambda: None),
        ("CUDAGraph", Graph),
        ("graph", capture),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(decode, "_forward", recorded)
    decode._capture(decode._tree)
    assert [size for size, _ in calls] == [4, 4, 2, 2]  # 1 is below DEFT_MIN_BATCH
    calls.clear()
    for new, prompt in zip((2, 3, 4), PROMPTS, strict=True):
        assert plain.add(prompt, new) == engine.add(prompt, new)
    assert drain(engine) == drain(plain)
    assert replays == [4, 2]
    assert [size for size, _ in calls] == [1]


def test_verification_finds_wrong_output(model, monkeypatch):
    monkeypatch.setenv("DEFT_VERIFY", "1")
    engine = Engine(model, num_pages=64, page_size=8, max_batch=2)
    run = TreeAttention.run
    monkeypatch.setattr(TreeAttention, "run", lambda *args, **kwargs: 1.01 * run(*args, **kwargs))
    for prompt in PROMPTS[:2]:
        engine.add(prompt, 2)
    with pytest.raises(RuntimeError, match="layer 0: tree attention is off"):
        engine.step()


def test_requests_wait_for_pages_and_rows(model):
    prompts = (PROMPTS[0], DIGITS, PROMPTS[1])
    roomy = Engine(model, num_pages=64, page_size=8, max_batch=3, attention="torch")
    tight = Engine(model, num_pages=13, page_size=8, max_batch=2, attention="torch")
    requests = [roomy.add(prompt, 3) for prompt in prompts]
    assert requests == [tight.add(prompt, 3) for prompt in prompts]
    roomy.step()
    assert list(roomy.running) == requests
    expected = {request: roomy.running[request].tokens[-2:] for request in requests}
    tight.step()
    assert list(tight.running) == requests[:1]  # 11 of 12 pages; the second needs 4
    answers = drain(tight)
    assert {request: answers[request][:2] for request in requests[1:]} == {
        request: expected[request] for request in requests[1:]
    }
    assert tight.pool.num_unused == 12


def test_page_quotes_the_example():
    sources = [path.read_text() for path in (ROOT / "examples").rglob("*.py")]
    code = [[line.strip() for line in text.splitlines() if line.strip()] for text in sources]
    page = (ROOT / "docs" / "writing-a-host.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) > 8
    for block in blocks:
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        assert any(
            lines == text[at : at + len(lines)] for text in code for at in range(len(text))
        ), f"not in the example:\n{block}"
