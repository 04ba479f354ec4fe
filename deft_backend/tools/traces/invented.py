"""Invented text for prompts: equal on every machine. Notes hold codes; a question asks for one."""

import random
import re

MOST_TOKENS = 10**7  # of a prompt: the client makes its text

_KEYS = tuple(
    re.findall(
        r"\w+",
        "ANCHOR BADGER CANDLE DRAGON EMBER FALCON GARNET HARBOR ISLAND JASPER KETTLE LANTERN "
        "MARBLE NEEDLE OTTER PEBBLE QUARTZ RAVEN SADDLE TIMBER UMBER VIOLET WILLOW ZEPHYR",
    )
)

_FACTS = (
    "The town of Arbeth stands on the river Wend. Its ruler is Queen Mara. "
    "The people of Arbeth sell rope and eat plum bread.",
    "The town of Belmora stands on the river Isk. Its ruler is King Odo. "
    "The people of Belmora sell glass and eat rye bread.",
    "The town of Corvane stands on the river Tarrow. Its ruler is Duke Fenn. "
    "The people of Corvane sell salt and eat nut bread.",
    "The town of Dunwick stands on the river Lumen. Its ruler is Lady Orla. "
    "The people of Dunwick sell wool and eat oat bread.",
    "Count from 10 to 18. 10, 11, 12, 13, 14, 15, 16, 17, 18.",
    "What is 7 plus 5? 7 plus 5 is 12.",
    "Repeat the words acorn bell coin. acorn bell coin.",
    "Sort the digits 7 2 9 4 1. 1 2 4 7 9.",
)


def codes(seed: int | str) -> dict[str, str]:
    chance = random.Random(f"codes {seed}")
    keys = chance.sample(_KEYS, len(_KEYS))
    return {key: f"{chance.randrange(1000, 10000)}" for key in keys}


def passage(size: int, seed: int | str) -> str:
    """Exactly `size` characters (and bytes) of notes; different seeds differ from the start."""
    chance = random.Random(f"passage {seed}")
    known = codes(seed)
    sentences = [f"The code of {key} is {code}." for key, code in known.items()]
    text = ""
    while len(text) < size:
        block = " ".join(chance.sample(sentences, 3)) + "\n\n" + chance.choice(_FACTS)
        text = f"{text}\n\n{block}" if text else block
    return text[-size:]


def question(branch: int, notes: str) -> str:
    """Question number `branch` about a code in `notes`; neighbouring questions differ."""
    known = list(dict.fromkeys(re.findall(r"The code of ([A-Z]+) is \d{4}\.", notes))) or _KEYS
    turn = f"{branch // len(known) + 1}. " if branch >= len(known) else ""
    return f"\n\n{turn}What is the code of {known[branch % len(known)]}?"
