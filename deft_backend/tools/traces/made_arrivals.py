"""Makes traces of arrivals: conversations and agents about documents behind one system prompt."""

import random
from dataclasses import dataclass

from deft_backend.tools.traces.arrivals import BLOCK_TOKENS, Arrival
from deft_backend.tools.traces.recorded_trees import MOST_TOKENS, TraceError


@dataclass(frozen=True)
class TraceShape:
    """What a made trace holds."""

    requests: int = 200  # requests in all
    rate: float = 2.0  # requests a second, on average; the gaps are exponential (Poisson arrivals)
    system_tokens: int = 1024  # tokens of the system prompt that all requests share; 0 for none
    # Documents behind the system prompt; 0 for none. The first ones are asked about most often.
    documents: int = 8
    # Mean tokens of a document, of a turn's own text and of an answer.
    document_tokens: int = 4096
    own_tokens: int = 256
    answer_tokens: int = 200
    # Mean number of turns of a conversation. A turn repeats all earlier text and answers.
    turns: float = 1.5
    seed: int = 0
    # Sub-agents that a turn starts together from its history; the next turn holds their answers.
    forks: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("requests", 1, 10**7), ("system_tokens", 0, MOST_TOKENS), ("documents", 0, 10**4),
            ("document_tokens", 1, MOST_TOKENS), ("own_tokens", 1, MOST_TOKENS),
            ("answer_tokens", 1, MOST_TOKENS), ("turns", 1, 10**4), ("rate", 1e-6, 1e6),
            ("forks", 0, 10**4),
        ):  # fmt: skip
            value = getattr(self, name)
            if not least <= value <= most:  # also refuses what is not a number
                option = "--" + name.replace("_", "-")
                raise TraceError(f"{option} is {value}; expected {least:,} to {most:,}")


@dataclass
class _Conversation:
    ids: list[int]
    tokens: int


def make_arrivals(shape: TraceShape) -> list[Arrival]:
    """A trace of this shape; the same seed gives the same trace everywhere."""
    chance = random.Random(f"arrivals {shape.seed}")
    maker = _Maker(shape, chance)
    arrivals: list[Arrival] = []
    at = 0.0
    while len(arrivals) < shape.requests:
        together = maker.next()
        at += 1e3 * chance.expovariate(shape.rate / len(together))
        arrivals += [Arrival(at, tokens, answer, ids) for tokens, ids, answer in together]
    return arrivals[: shape.requests]


_Request = tuple[int, tuple[int, ...], int]  # prompt tokens, block ids and answer tokens


class _Maker:
    def __init__(self, shape: TraceShape, chance: random.Random) -> None:
        self._shape = shape
        self._chance = chance
        self._next = 0
        system = self._blocks(_Conversation([], 0), shape.system_tokens)
        self._starts = [
            self._blocks(_copy(system), self._length(mean))
            for mean in [shape.document_tokens] * shape.documents
        ] or [system]
        self._weights = [1.0 / (rank + 1) for rank in range(len(self._starts))]
        self._open: list[_Conversation] = []
        self._forked: list[_Conversation] = []

    def next(self) -> list[_Request]:
        """The requests that arrive next: a turn, or all sub-agents of a conversation."""
        if self._forked and self._chance.random() < 0.5:
            talk = self._forked.pop(0)
            self._open.append(talk)
            return [self._turn(talk)]
        again = self._open and self._chance.random() < 1.0 - 1.0 / self._shape.turns
        if again:
            talk = self._open.pop(self._chance.randrange(len(self._open)))
        else:
            (start,) = self._chance.choices(self._starts, self._weights)
            talk = _copy(start)
        if not again or not self._shape.forks:
            self._open.append(talk)
            return [self._turn(talk)]
        asked = [self._turn(_copy(talk)) for _ in range(self._shape.forks)]
        self._blocks(talk, sum(answer for _, _, answer in asked))
        self._forked.append(talk)
        return asked

    def _turn(self, talk: _Conversation) -> _Request:
        self._blocks(talk, self._length(self._shape.own_tokens))
        answer = self._length(self._shape.answer_tokens)
        asked = talk.tokens, tuple(talk.ids), answer
        self._blocks(talk, answer)
        return asked

    def _blocks(self, talk: _Conversation, tokens: int) -> _Conversation:
        """Append tokens. A block that was not full gets a new id, because its text changes."""
        if tokens and talk.tokens % BLOCK_TOKENS:
            talk.ids.pop()
        talk.tokens += tokens
        while len(talk.ids) * BLOCK_TOKENS < talk.tokens:
            talk.ids.append(self._next)
            self._next += 1
        return talk

    def _length(self, mean: int) -> int:
        """Unequal lengths with this mean: log-normal, at most eight times the mean."""
        drawn = mean * self._chance.lognormvariate(-0.18, 0.6)
        return max(1, min(round(drawn), 8 * mean))


def _copy(talk: _Conversation) -> _Conversation:
    return _Conversation(list(talk.ids), talk.tokens)
