"""What each host's own endpoint is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TOP = 5
"""Most likely tokens of which log-probabilities are asked for."""

Get = Callable[[str], Awaitable[Any]]
"""Reads a JSON document of the server, by its path."""

Prompt = Sequence[int]


class ClientError(RuntimeError):
    """A request was refused or cut off, or its answer is not what was asked for."""


@dataclass
class Completion:
    """One greedy answer.

    Attributes
    ----------
    ids : list of int
        Its tokens.
    arrivals : list of float
        Seconds from sending to each token; empty unless it was streamed.
    sent : float
        When it was sent, on :func:`time.perf_counter`'s clock.
    logprobs : list of float
        Log-probability of each token, if asked for.
    top : list of dict
        For each token the log-probabilities of the :data:`TOP` likeliest ids, if asked for.
    cached : int, optional
        Tokens of the prompt that were in the host's prefix cache, if it says so.
    """

    ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    sent: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    cached: int | None = None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Dialect(Protocol):
    """What a host's endpoint is asked, and what it answers."""

    path: str
    takes_in_together: bool

    async def prepare(self, get: Get) -> None:
        """Learn what requests need to say from the server's documents."""
        ...

    def body(
        self, prompts: Sequence[Prompt], tokens: int, *, logprobs: bool, stream: bool
    ) -> dict[str, Any]:
        """The request."""
        ...

    def answers(self, content: Any) -> list[Completion]:
        """All answers of a batch, in the prompts' order."""
        ...

    def piece(self, content: Any, so_far: Completion) -> list[int]:
        """New ids of a streamed piece."""
        ...

    def gap_body(self, prompt: Prompt, token: int) -> dict[str, Any]:
        """The request for :meth:`gap`."""
        ...

    def gap(self, content: Any, token: int) -> float:
        """How much likelier than `token` the likeliest token after the prompt is."""
        ...


class SGLangDialect:
    path = "/generate"
    takes_in_together = True

    async def prepare(self, get: Get) -> None:
        """Nothing to learn."""

    def body(
        self, prompts: Sequence[Prompt], tokens: int, *, logprobs: bool, stream: bool
    ) -> dict[str, Any]:
        settings = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        ids = [list(prompt) for prompt in prompts]
        body: dict[str, Any] = {
            "input_ids": ids[0] if stream else ids, "sampling_params": settings, "stream": stream,
        }  # fmt: skip
        if logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": TOP}
        return body

    def answers(self, content: Any) -> list[Completion]:
        found = []
        for answer in content:
            meta = answer["meta_info"]
            chosen = meta.get("output_token_logprobs") or []
            top = meta.get("output_top_logprobs") or []
            found.append(
                Completion(
                    ids=list(answer["output_ids"]),
                    logprobs=[entry[0] for entry in chosen],
                    top=[{entry[1]: entry[0] for entry in entries or []} for entries in top],
                    cached=meta.get("cached_tokens"),
                )
            )
        return found

    def piece(self, content: Any, so_far: Completion) -> list[int]:
        if "error" in content:
            raise ClientError(f"{self.path} broke off: {content['error']}")
        meta = content["meta_info"]
        so_far.cached = meta.get("cached_tokens", so_far.cached)
        ids: list[int] = content["output_ids"]
        fresh = meta["completion_tokens"] - len(so_far.ids)
        return ids[-fresh:] if fresh > 0 else []  # pieces hold all ids so far, or the new ones

    def gap_body(self, prompt: Prompt, token: int) -> dict[str, Any]:
        return {**self.body([prompt], 1, logprobs=True, stream=False), "token_ids_logprob": [token]}

    def gap(self, content: Any, token: int) -> float:
        meta = content[0]["meta_info"]
        likeliest: float = meta["output_token_logprobs"][0][0]
        (value,) = (v for v, id, *_ in meta["output_token_ids_logprobs"][0] if id == token)
        return likeliest - float(value)


class VLLMDialect:
    path = "/v1/completions"
    takes_in_together = False

    def __init__(self) -> None:
        self.model = ""

    async def prepare(self, get: Get) -> None:
        listed = await get("/v1/models")
        if not listed or not listed.get("data"):
            raise ClientError("the server does not list its model under /v1/models")
        self.model = listed["data"][0]["id"]

    def body(
        self, prompts: Sequence[Prompt], tokens: int, *, logprobs: bool, stream: bool
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model, "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": stream,
            "return_token_ids": True,
        }  # fmt: skip
        if logprobs:
            body |= {"logprobs": TOP, "return_tokens_as_token_ids": True}
        return body

    def answers(self, content: Any) -> list[Completion]:
        found = []
        for choice in sorted(content["choices"], key=lambda choice: int(choice["index"])):
            logprobs = choice.get("logprobs") or {}
            found.append(
                Completion(
                    ids=list(choice["token_ids"]),
                    logprobs=list(logprobs.get("token_logprobs") or []),
                    top=[
                        {_token_id(name): value for name, value in entries.items()}
                        for entries in logprobs.get("top_logprobs") or []
                    ],
                )
            )
        return found

    def piece(self, content: Any, so_far: Completion) -> list[int]:
        if "error" in content:
            raise ClientError(f"{self.path} broke off: {content['error']}")
        return [id for choice in content["choices"] for id in choice.get("token_ids") or []]

    def gap_body(self, prompt: Prompt, token: int) -> dict[str, Any]:
        # Of no token of an answer but the likeliest ones, and of every token of a prompt.
        body = self.body([[*prompt, token]], 1, logprobs=False, stream=False)
        return {**body, "prompt_logprobs": 1}

    def gap(self, content: Any, token: int) -> float:
        last = content["choices"][0]["prompt_logprobs"][-1]
        likeliest: float = max(entry["logprob"] for entry in last.values())
        return likeliest - float(last[str(token)]["logprob"])


def _token_id(name: str) -> int:
    """The id of ``token_id:17``."""
    return int(name.removeprefix("token_id:"))
