"""The requests and answers of each endpoint that the client supports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from deft_backend.tools.harness.answers import Answer

TOP = 5
"""Likeliest tokens whose log-probabilities a batch of token ids asks for."""

Get = Callable[[str], Awaitable[Any]]
"""Reads a JSON document of the server, by its path."""

Ids = Sequence[int]


class ClientError(RuntimeError):
    """The server refused a request or cut it off, or the answer does not fit the request."""


class Dialect(Protocol):
    """The form of a host's requests and answers of token ids."""

    path: str
    takes_in_together: bool

    async def prepare(self, get: Get) -> None:
        """Read from the server's documents the fields that every request must have."""
        ...

    def stream_body(self, prompt: Ids, tokens: int) -> dict[str, Any]:
        """A request for one streamed answer."""
        ...

    def take(self, content: Any, answer: Answer, now: float) -> None:
        """Add a streamed piece that arrived `now` to its answer."""
        ...

    def batch_body(self, prompts: Sequence[Ids], tokens: int, *, logprobs: bool) -> dict[str, Any]:
        """A request for one answer to each prompt."""
        ...

    def answers(self, content: Any) -> list[Answer]:
        """All answers of a batch, in the prompts' order."""
        ...

    def whole_body(self, prompt: Ids, tokens: int, *, beams: int, sampled: bool) -> dict[str, Any]:
        """A request for one sampled answer, or for all beams of a beam search."""
        ...

    def whole(self, content: Any) -> list[Answer]:
        """The answer, or the beams, best first."""
        ...

    sleep: tuple[str, str]
    """Paths that free the GPU's memory between rollouts, and take it back."""

    def gap_body(self, prompt: Ids, token: int) -> dict[str, Any]:
        """The request for :meth:`gap`."""
        ...

    def gap(self, content: Any, token: int) -> float:
        """How much likelier than `token` the likeliest token after the prompt is."""
        ...


class SGLangDialect:
    """SGLang's ``/generate``, with token ids."""

    path = "/generate"
    takes_in_together = True
    sleep = ("/release_memory_occupation", "/resume_memory_occupation")

    async def prepare(self, get: Get) -> None:
        """Nothing to learn."""

    def batch_body(self, prompts: Sequence[Ids], tokens: int, *, logprobs: bool) -> dict[str, Any]:
        body = {**_sglang_body(tokens), "input_ids": [list(prompt) for prompt in prompts]}
        if logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": TOP}
        return body

    def stream_body(self, prompt: Ids, tokens: int) -> dict[str, Any]:
        return {**_sglang_body(tokens), "input_ids": list(prompt), "stream": True}

    def answers(self, content: Any) -> list[Answer]:
        found = []
        for answer in content:
            meta = answer["meta_info"]
            chosen = meta.get("output_token_logprobs") or []
            top = meta.get("output_top_logprobs") or []
            found.append(
                Answer(
                    ids=list(answer["output_ids"]),
                    logprobs=[entry[0] for entry in chosen],
                    top=[{entry[1]: entry[0] for entry in entries or []} for entries in top],
                    cached=meta.get("cached_tokens"),
                )
            )
        return found

    def take(self, content: Any, answer: Answer, now: float) -> None:
        _refuse_error(self.path, content)
        meta = content["meta_info"]
        answer.cached = meta.get("cached_tokens", answer.cached)
        ids: list[int] = content["output_ids"]
        fresh = meta["completion_tokens"] - len(answer.ids)
        # Pieces hold all ids so far, or only the new ones.
        _arrived(answer, ids[-fresh:] if fresh > 0 else [], now)

    def whole_body(self, prompt: Ids, tokens: int, *, beams: int, sampled: bool) -> dict[str, Any]:
        body = {**_sglang_body(tokens), "input_ids": list(prompt)}
        body["sampling_params"]["temperature"] = int(sampled)
        if beams > 1:
            body["sampling_params"] |= {"beam_width": beams, "n": beams}
        return body

    def whole(self, content: Any) -> list[Answer]:
        beams = content["meta_info"].get("beam_results") or [content]
        return [Answer(ids=list(beam["output_ids"])) for beam in beams]

    def gap_body(self, prompt: Ids, token: int) -> dict[str, Any]:
        return {**self.batch_body([prompt], 1, logprobs=True), "token_ids_logprob": [token]}

    def gap(self, content: Any, token: int) -> float:
        meta = content[0]["meta_info"]
        likeliest: float = meta["output_token_logprobs"][0][0]
        (value,) = (v for v, id, *_ in meta["output_token_ids_logprobs"][0] if id == token)
        return likeliest - float(value)


class VLLMDialect:
    """vLLM's ``/v1/completions``, with token ids."""

    path = "/v1/completions"
    takes_in_together = False
    sleep = ("/sleep?level=1", "/wake_up")

    def __init__(self) -> None:
        self.model = ""

    async def prepare(self, get: Get) -> None:
        listed = await get("/v1/models")
        if not listed or not listed.get("data"):
            raise ClientError("the server does not list its model under /v1/models")
        self.model = listed["data"][0]["id"]

    def _body(self, prompt: Any, tokens: int) -> dict[str, Any]:
        return {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip

    def batch_body(self, prompts: Sequence[Ids], tokens: int, *, logprobs: bool) -> dict[str, Any]:
        body = {**self._body([list(prompt) for prompt in prompts], tokens), "stream": False}
        if logprobs:
            body |= {"logprobs": TOP, "return_tokens_as_token_ids": True}
        return body

    def stream_body(self, prompt: Ids, tokens: int) -> dict[str, Any]:
        return {**self._body([list(prompt)], tokens), "stream": True}

    def answers(self, content: Any) -> list[Answer]:
        found = []
        for choice in sorted(content["choices"], key=lambda choice: int(choice["index"])):
            logprobs = choice.get("logprobs") or {}
            found.append(
                Answer(
                    ids=list(choice["token_ids"]),
                    logprobs=list(logprobs.get("token_logprobs") or []),
                    top=[
                        {_token_id(name): value for name, value in entries.items()}
                        for entries in logprobs.get("top_logprobs") or []
                    ],
                )
            )
        return found

    def take(self, content: Any, answer: Answer, now: float) -> None:
        _refuse_error(self.path, content)
        ids = [id for choice in content["choices"] for id in choice.get("token_ids") or []]
        _arrived(answer, ids, now)

    def whole_body(self, prompt: Ids, tokens: int, *, beams: int, sampled: bool) -> dict[str, Any]:
        body = {**self._body([list(prompt)], tokens), "stream": False, "temperature": int(sampled)}
        return {**body, "use_beam_search": True, "n": beams} if beams > 1 else body

    def whole(self, content: Any) -> list[Answer]:
        return self.answers(content)

    def gap_body(self, prompt: Ids, token: int) -> dict[str, Any]:
        # vLLM reports the log-probability of each token of a prompt. Of an answer's tokens it
        # reports only the likeliest ones.
        return {
            **self.batch_body([[*prompt, token]], 1, logprobs=False), "prompt_logprobs": 1,
        }  # fmt: skip

    def gap(self, content: Any, token: int) -> float:
        last = content["choices"][0]["prompt_logprobs"][-1]
        likeliest: float = max(entry["logprob"] for entry in last.values())
        return likeliest - float(last[str(token)]["logprob"])


def _sglang_body(tokens: int) -> dict[str, Any]:
    settings = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"sampling_params": settings, "stream": False}


def _arrived(answer: Answer, ids: Sequence[int], now: float) -> None:
    answer.ids.extend(ids)
    answer.arrivals.extend([now] * len(ids))


def _refuse_error(path: str, content: Any) -> None:
    if "error" in content:
        raise ClientError(f"{path} broke off: {content['error']}")


def _token_id(name: str) -> int:
    """The id of ``token_id:17``."""
    return int(name.removeprefix("token_id:"))
