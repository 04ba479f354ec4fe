"""An answer as a client receives it, and the comparison of two answers to one prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

EIGHT_BITS = 3.0
"""How many times larger a near tie may be with a KV cache of 8 bits. Where the noise of the layers
below moves a key or a value over the middle of two numbers, the cache holds the other number: in
e4m3, 6 to 12 % away. The hosts' own backends also round queries and probabilities to 8 bits. With
three times bfloat16's 0.26, none of a soak's 26,281 tokens was wrong
(soak-h100.json)."""


@dataclass
class Answer:
    """One greedy answer. A list holds one element for each token, or is empty."""

    request: str = ""  # name of the request
    # Token ids, and their texts. Servers without a tokenizer give no texts.
    ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    text: str = ""  # the whole text
    # Seconds from sending the request to each token; empty unless the answer was streamed.
    arrivals: list[float] = field(default_factory=list)
    sent: float = 0.0  # time of sending, on :func:`time.perf_counter`'s clock
    # Log-probability of each token, if the client asked for it.
    logprobs: list[float] = field(default_factory=list)
    # For each token, the log-probabilities of the likeliest ones, by id or by text.
    top: list[Mapping[Any, float]] = field(default_factory=list)
    # Tokens of the prompt that the host found in its prefix cache, if it reports them.
    cached: int | None = None

    def __len__(self) -> int:
        """Tokens of the answer."""
        return max(len(self.ids), len(self.tokens))

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.arrivals[0]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None for a single token."""
        later = len(self.arrivals) - 1
        return (self.arrivals[-1] - self.arrivals[0]) / later if later else None

    def margin(self, position: int) -> float:
        """How far the token's log-probability exceeds the second likeliest one's; 0 if unknown."""
        if position >= len(self.top) or len(self.top[position]) < 2:
            return 0.0
        return self.logprobs[position] - sorted(self.top[position].values())[-2]


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    """Index of the first element that differs; None if one sequence is a prefix of the other."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), None)
