"""Token sequences of invented text, for training and for held-out measurements."""

from __future__ import annotations

import random

from byte_tokens import BOS, encode_conversation
from corpus import Writer

HELD_OUT_SEED = 1_000_000_000
"""Seeds below this one are for training, the others for measuring."""


def write_sequence(seed: int, length: int) -> list[int]:
    """Return exactly ``length`` tokens of conversations, of one text, or of several texts."""
    chance = random.Random(seed)
    shape = chance.random()
    tokens: list[int] = []
    if shape < 0.25:
        while len(tokens) < length:
            size = chance.randrange(100, 1500)
            tokens += encode_conversation(Writer(chance.getrandbits(64)).conversation(size))
    elif shape < 0.4:
        texts: list[str] = []
        while sum(map(len, texts)) < length:
            size = chance.randrange(150, 900)
            texts.append(Writer(chance.getrandbits(64)).document(size))
        tokens = list("\n\n".join(texts).encode())
    else:
        # Some texts open in the middle of a sentence, as a truncated prompt does.
        skipped = chance.choice((0, chance.randrange(100)))
        text = Writer(chance.getrandbits(64)).document(length + skipped)
        tokens = [BOS] * (chance.random() < 0.2) + list(text.encode())[skipped:]
    return tokens[:length]
