"""What the client sends, and what it says of servers that are none."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest.mock import AsyncMock

import aiohttp
import pytest

from deft_backend.tools.harness.answers import NotAnswered
from deft_backend.tools.harness.client import Offers, ServerClient, ServerError, base_url

BODY = {"model": "M", "prompt": [1, 2], "max_tokens": 3, "temperature": 0.0, "lora_path": "L"}
PAIR = {"choices": [{"index": at, "token_ids": [at] * 3} for at in (1, 0)]}


async def lines(text):
    yield b"data: " + text.encode()
    yield b"data: [DONE]\n"


class Session:
    """In place of aiohttp's: notes the bodies, and gives one answer to all, or a stream of it."""

    def __init__(self, content, status=200):
        text, self.bodies = json.dumps(content), []
        found = {"read": text.encode(), "text": text, "json": content}
        read = {name: AsyncMock(return_value=value) for name, value in found.items()}
        self._response = SimpleNamespace(status=status, content=lines(text), **read)

    @asynccontextmanager
    async def post(self, url, *, json):
        assert url == "http://x/v1/completions"
        self.bodies.append(json)
        yield self._response

    @asynccontextmanager
    async def get(self, url, *, timeout):
        assert (url, timeout.total) == ("http://x/v1/models", 10)
        yield self._response


def client_of(session, **given):
    client = ServerClient("http://x", fields={"lora_path": "L"}, **given)
    client.model, client._session = "M", session
    return client


STREAMED = {"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}])
def test_the_body_of_a_streamed_answer(more):
    piece = {"choices": [{"text": "abc", "token_ids": [1, 2, 3]}]}
    client = client_of(Session(piece), logprobs=bool(more))
    answer, _ = asyncio.run(client.ask((1, 2), 3, temperature=0.5))
    asked = {**BODY, **STREAMED, **more, "stream": True, "temperature": 0.5}
    assert client._session.bodies == [asked]
    assert answer.ids == [1, 2, 3]


def test_the_body_of_a_batch():
    client = client_of(Session(PAIR))
    answers = asyncio.run(client.batch([(1, 2), "b"], 3, likeliest=5))
    own = {"prompt": [[1, 2], "b"], "ignore_eos": True, "return_token_ids": True}
    likely = {"logprobs": 5, "return_tokens_as_token_ids": True}
    assert client._session.bodies == [{**BODY, **own, **likely}]
    assert [answer.ids for answer in answers] == [[0, 0, 0], [1, 1, 1]]
    asyncio.run(client.batch([(1, 2), "b"], 3))
    assert client._session.bodies[1] == {**BODY, **own}
    for prompts, tokens in ((["a"], 3), (["a", "b"], 2)):
        with pytest.raises(NotAnswered, match=f"{len(prompts)} answers of {tokens} tokens, got 2"):
            asyncio.run(client.batch(prompts, tokens))


@pytest.mark.parametrize(
    ("session", "said"),
    [
        *((Session({}, status), "wants a key") for status in (401, 403)),
        (Session({}, 500), "returns status 500"),
        (Session({"data": []}), "lists no model"),
        (Session({}), "is not a list of models: KeyError"),
        (Session({"data": 3}), "is not a list of models: TypeError"),
    ],
)
def test_what_is_no_list_of_models(session, said):
    client = client_of(session)
    with pytest.raises(ServerError, match=said):
        asyncio.run(client.models())
    assert not asyncio.run(client.lives())


def test_the_session_of_a_client(monkeypatch):
    made, session = [], AsyncMock()
    monkeypatch.setattr(aiohttp, "ClientSession", lambda **given: made.append(given) or session)
    monkeypatch.setattr(aiohttp, "TCPConnector", lambda **given: given)

    async def opened():
        async with ServerClient("http://x", seconds=7.0):
            assert session.close.await_count == len(made) - 1

    for key, headers in (("K", {"Authorization": "Bearer K"}), ("", {})):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        asyncio.run(opened())
        limits = aiohttp.ClientTimeout(total=7.0, sock_connect=30)
        connector = {"limit": 0, "force_close": True}
        sizes = {"connector": connector, "timeout": limits, "read_bufsize": 1 << 22}
        assert made[-1] == {**sizes, "headers": headers}
    assert session.close.await_count == 2


@pytest.mark.parametrize(
    ("likely", "margin"),
    [([{"a": -1.0, "b": -3.5, "c": -2.0}], 1.0), ([{"a": -1.0}], None), ([], None), (None, None)],
)
def test_how_far_the_likeliest_token_is_ahead(likely, margin, monkeypatch):
    told = {"choices": [{"prompt_token_ids": [1], "logprobs": {"top_logprobs": likely}}]}
    whole = AsyncMock(return_value=told)
    monkeypatch.setattr(ServerClient, "_whole", whole)
    assert asyncio.run(ServerClient("http://x").margin("p", [5, 6])) == margin
    assert [call.args for call in whole.await_args_list] == [("p", 1), ((1, 5, 6), 1)]


LISTED = [{"id": "M", "max_model_len": 64}, {"id": "N", "max_model_len": "?"}]


@pytest.mark.parametrize(
    ("asked", "tokens", "offers"),
    [
        (None, 4, Offers("M", 64, 2.5)),
        ("N", 4, Offers("N", None, 2.5)),
        ("M", None, Offers("M", 64, 4.0)),
    ],
)
def test_what_a_server_offers(asked, tokens, offers):
    content = {
        "data": LISTED,
        "usage": {"prompt_tokens": tokens},
        "choices": [{"text": "a", "token_ids": [1, 2]}],
    }
    assert asyncio.run(client_of(Session(content)).offers(asked, 10 * "x")) == offers
    with pytest.raises(ServerError, match="http://x has no model 'O'; it lists M, N"):
        asyncio.run(client_of(Session(content)).offers("O", "x"))


@pytest.mark.parametrize("wrong", ["", "http://", "ftp://a", "http://a b", "http://a:65536"])
def test_what_is_no_address(wrong):
    with pytest.raises(ServerError, match=r"is not an address|no port between 0 and 65535"):
        base_url(wrong)
