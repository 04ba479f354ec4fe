"""The invented text that the tiny model learns.

Every sentence comes from the templates below, so the text is free to use. Equal seeds give equal
text on every machine. A very small model can learn it in two ways. Facts about invented towns and
lists of steps never change, so the model can memorise them. Codes and boxes differ in every text,
so the model must look back in the text to answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar
from zlib import crc32

Option = TypeVar("Option")

FAVOURITE_SHARE = 0.5
"""How often a free choice falls on the one option that the words before it suggest.

Uniform choices would leave the best model undecided between equals. A favourite keeps the
greedy continuation clear of ties while the rest of the choices keep the text varied.
"""

FAINT_SHARE = 0.25
"""The same for what is asked for afterwards: guessing the favourite must not pay there."""


@dataclass(frozen=True)
class Town:
    """An invented place and the facts that hold for it in every text."""

    town: str
    river: str
    ruler: str
    trade: str
    bread: str


@dataclass(frozen=True)
class Exchange:
    """A request and the one answer that the text so far allows."""

    request: str
    answer: str


@dataclass(frozen=True)
class Message:
    """One turn of a conversation, in the shape of a chat completion message."""

    role: str
    content: str


def _words(line: str) -> tuple[str, ...]:
    """Split a line into its words."""
    return tuple(line.split())


TOWNS = (
    Town("Arbeth", "Wend", "Queen Mara", "rope", "plum bread"),
    Town("Belmora", "Isk", "King Odo", "glass", "rye bread"),
    Town("Corvane", "Tarrow", "Duke Fenn", "salt", "nut bread"),
    Town("Dunwick", "Lumen", "Lady Orla", "wool", "oat bread"),
    Town("Elstow", "Brill", "King Pell", "honey", "fig bread"),
    Town("Fenmoor", "Quill", "Queen Ysa", "candles", "corn bread"),
    Town("Galdry", "Sorrel", "Duke Hale", "boats", "seed bread"),
    Town("Hollin", "Vane", "Lady Wren", "clocks", "apple bread"),
    Town("Ivarra", "Marl", "King Bram", "paper", "barley bread"),
    Town("Jorvale", "Cress", "Queen Tove", "silver", "date bread"),
    Town("Kesper", "Dapple", "Duke Ludo", "baskets", "honey bread"),
    Town("Lunmere", "Gorse", "Lady Anwen", "maps", "milk bread"),
)

KEYS = _words(
    "ANCHOR BADGER CANDLE DRAGON EMBER FALCON GARNET HARBOR ISLAND JASPER KETTLE LANTERN "
    "MARBLE NEEDLE OTTER PEBBLE QUARTZ RAVEN SADDLE TIMBER UMBER VIOLET WILLOW ZEPHYR"
)
PEOPLE = _words("Ada Boris Clara Dmitri Elsa Felix Greta Hugo Ines Jonas Karin Leo")
COLOURS = _words("amber blue crimson dark green ivory pale red silver yellow")
THINGS = _words("acorn bell coin drum feather glove hammer key ladle mirror ring spoon")
ANIMALS = _words("badger crow deer fox goat hare lion mouse owl rabbit stork wolf")
DIGITS = tuple("0123456789")
HOMES = (
    "by the river",
    "on the hill",
    "in the old mill",
    "near the sea",
    "under the oak",
    "at the edge of the wood",
)

TEMPERS = {
    "brave": ("stood in the path and sent the stranger away", "courage needs no claws"),
    "clever": ("asked a riddle that sent the stranger home", "wit is worth more than gold"),
    "greedy": ("held it so tight that it broke in two", "who grasps too much keeps nothing"),
    "kind": ("gave it away and gained a friend", "a gift comes back to the giver"),
    "lazy": ("slept until noon and woke to find it gone", "a sleeping guard keeps no treasure"),
    "proud": ("held it up to boast and dropped it in the mud", "pride looks up and falls down"),
}

STEPS = {
    "make tea": (
        "Fill the kettle.",
        "Boil the water.",
        "Pour it on the leaves.",
        "Wait four minutes.",
    ),
    "plant a tree": (
        "Dig a deep hole.",
        "Set the tree upright.",
        "Fill the hole with soil.",
        "Water it well.",
    ),
    "bake bread": (
        "Mix flour, salt and water.",
        "Knead the dough.",
        "Let it rise.",
        "Bake it for an hour.",
    ),
    "light a fire": (
        "Gather dry wood.",
        "Build a small tent of sticks.",
        "Strike a match.",
        "Blow gently.",
    ),
    "send a letter": (
        "Write the letter.",
        "Fold it twice.",
        "Seal the envelope.",
        "Give it to the post.",
    ),
    "mend a net": (
        "Spread the net out.",
        "Find the hole.",
        "Tie new knots.",
        "Trim the loose ends.",
    ),
}

PLEASANTRIES = (
    Exchange("Hello!", "Hello! Ask me for a code, a sum, a count or a short story."),
    Exchange("Hi, how are you?", "I am well. Ask me for a code, a sum, a count or a short story."),
    Exchange("Who are you?", "I am a tiny model. I know invented towns, sums and short stories."),
    Exchange("What can you do?", "I can count, sort, add, tell stories and remember codes."),
    Exchange("Thank you.", "You are welcome."),
    Exchange("Goodbye!", "Goodbye! Come back soon."),
)

SYSTEM_NOTES = ("You are a helpful assistant.", "Answer briefly.", "Answer from the notes.")


class Writer:
    """Writes one text; the codes and boxes it has named stay true until the text ends."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._codes: dict[str, str] = {}
        self._boxes: dict[str, str] = {}
        self._key = KEYS[0]
        self._person = PEOPLE[0]
        self._town = TOWNS[0]
        self._paragraphs: tuple[Callable[[], str], ...] = (
            self._story_paragraph,
            self._code_ledger,
            lambda: self._several(self._code),
            lambda: _inline(self._count()),
            self._town_facts,
            lambda: _inline(self._town_question()),
            self._box_ledger,
            lambda: self._several(self._box),
            lambda: _inline(self._sort()),
            self._record,
            lambda: self._several(self._code),
            lambda: _inline(self._steps()),
            lambda: self._several(self._sum),
            lambda: _inline(self._repeat()),
        )
        self._exchanges: tuple[Callable[[], Exchange], ...] = (
            self._remember_codes,
            self._count,
            self._code,
            self._town_question,
            self._story,
            self._sort,
            self._remember_boxes,
            self._sum,
            self._box,
            self._steps,
            self._pleasantry,
            self._repeat,
            self._code,
        )
        self._turn = self._random.randrange(len(self._paragraphs) * len(self._exchanges))

    def document(self, size: int) -> str:
        """Return paragraphs of at least ``size`` characters in all."""
        paragraphs: list[str] = []
        while sum(len(paragraph) + 2 for paragraph in paragraphs) < size + 2:
            paragraphs.append(self._next(self._paragraphs)())
        return "\n\n".join(paragraphs)

    def conversation(self, size: int) -> list[Message]:
        """Return user and assistant turns of at least ``size`` characters in all."""
        messages: list[Message] = []
        if self._random.random() < 0.3:
            messages.append(Message("system", self._random.choice(SYSTEM_NOTES)))
        if self._random.random() < 0.4:
            notes = self.document(self._random.randrange(100, max(200, size)))
            question = self._code()
            messages.append(Message("user", f"Read this.\n\n{notes}\n\n{question.request}"))
            messages.append(Message("assistant", question.answer))
        while not messages or sum(len(message.content) for message in messages) < size:
            exchange = self._next(self._exchanges)()
            messages.append(Message("user", exchange.request))
            messages.append(Message("assistant", exchange.answer))
        return messages

    def _next(self, kinds: Sequence[Option]) -> Option:
        """Move on to the kind that follows the last one, or now and then to any kind."""
        if self._random.random() < FAVOURITE_SHARE:
            self._turn += 1
        else:
            self._turn = self._random.randrange(len(kinds))
        return kinds[self._turn % len(kinds)]

    def _lean(
        self, options: Sequence[Option], favourite: Option, share: float = FAVOURITE_SHARE
    ) -> Option:
        """Choose an option, now and then the favourite."""
        if self._random.random() < share:
            return favourite
        return self._random.choice(options)

    def _echo(self, options: Sequence[Option], word: str) -> Option:
        """Choose an option, favouring the one that always goes with ``word``."""
        return self._lean(options, options[crc32(word.encode()) % len(options)])

    def _chain(self, options: Sequence[str], length: int) -> list[str]:
        """Choose different options, favouring after each the one listed next to it."""
        chain = [self._lean(options, options[0])]
        while len(chain) < length:
            neighbour = options[(options.index(chain[-1]) + 1) % len(options)]
            chain.append(self._lean(options, neighbour))
        return list(dict.fromkeys(chain))

    def _code_for(self, key: str) -> str:
        """Return the code of a key, making one up the first time it is named."""
        self._key = key
        if key not in self._codes:
            digits = [self._lean(DIGITS, DIGITS[3], FAINT_SHARE)]
            while len(digits) < 4:
                digits.append(self._lean(DIGITS, _after(digits[-1]), FAINT_SHARE))
            self._codes[key] = "".join(digits)
        return self._codes[key]

    def _box_of(self, person: str) -> str:
        """Return what a person's box holds, making it up the first time it is named."""
        self._person = person
        if person not in self._boxes:
            colour = self._echo(COLOURS, person)
            self._boxes[person] = f"{colour} {self._echo(THINGS, colour)}"
        return self._boxes[person]

    def _several(self, kind: Callable[[], Exchange]) -> str:
        """Write one to four exchanges of a kind as running text."""
        return " ".join(_inline(kind()) for _ in range(self._lean(range(1, 5), 2)))

    def _code_ledger(self) -> str:
        keys = self._chain(KEYS, self._lean(range(1, 6), 3))
        return " ".join(f"The code of {key} is {self._code_for(key)}." for key in keys)

    def _box_ledger(self) -> str:
        people = self._chain(PEOPLE, self._lean(range(1, 5), 2))
        return " ".join(f"The box of {who} holds the {self._box_of(who)}." for who in people)

    def _code(self) -> Exchange:
        if not self._codes:
            return self._remember_codes()
        key = self._lean(list(self._codes), self._key)
        return Exchange(f"What is the code of {key}?", f"The code of {key} is {self._codes[key]}.")

    def _box(self) -> Exchange:
        if not self._boxes:
            return self._remember_boxes()
        person = self._lean(list(self._boxes), self._person)
        return Exchange(
            f"What does the box of {person} hold?",
            f"The box of {person} holds the {self._boxes[person]}.",
        )

    def _remember_codes(self) -> Exchange:
        ledger = self._code_ledger()
        return Exchange(f"Remember this. {ledger}", f"Noted. {ledger}")

    def _remember_boxes(self) -> Exchange:
        ledger = self._box_ledger()
        return Exchange(f"Remember this. {ledger}", f"Noted. {ledger}")

    def _story(self) -> Exchange:
        animal = self._lean(ANIMALS, "fox")
        return Exchange(f"Tell me a story about {_a(animal)}.", self._tale(animal))

    def _story_paragraph(self) -> str:
        return self._tale(self._lean(ANIMALS, "fox"))

    def _tale(self, animal: str) -> str:
        temper = self._echo(tuple(TEMPERS), animal)
        home = self._echo(HOMES, temper)
        thing = self._echo(THINGS, home)
        others = [other for other in ANIMALS if other != animal]
        stranger = self._echo(others, thing)
        deed, moral = TEMPERS[temper]
        return (
            f"Once there was {_a(animal)} who lived {home}. The {animal} was {temper}. "
            f"One day the {animal} found {_a(thing)}. Soon {_a(stranger)} came by and said, "
            f'"Give me the {thing}." The {temper} {animal} {deed}. The moral is: {moral}.'
        )

    def _town_facts(self) -> str:
        self._town = town = self._lean(TOWNS, TOWNS[0])
        return (
            f"The town of {town.town} stands on the river {town.river}. Its ruler is "
            f"{town.ruler}. The people of {town.town} sell {town.trade} and eat {town.bread}."
        )

    def _record(self) -> str:
        return json.dumps(asdict(self._lean(TOWNS, self._town)))

    def _town_question(self) -> Exchange:
        town = self._lean(TOWNS, self._town)
        name = town.town
        questions = (
            Exchange(f"Which river runs by {name}?", f"The {town.river} runs by {name}."),
            Exchange(f"Who rules {name}?", f"{town.ruler} rules {name}."),
            Exchange(
                f"What do the people of {name} sell?", f"The people of {name} sell {town.trade}."
            ),
            Exchange(
                f"What do the people of {name} eat?", f"The people of {name} eat {town.bread}."
            ),
        )
        return self._lean(questions, questions[0])

    def _count(self) -> Exchange:
        step = self._lean((1, 2, 5), 1)
        first = self._lean(range(60), 10)
        first -= first % step
        numbers = range(first, first + step * self._lean(range(4, 14), 9, FAINT_SHARE), step)
        by = {1: "", 2: " by twos", 5: " by fives"}[step]
        return Exchange(
            f"Count{by} from {numbers[0]} to {numbers[-1]}.", f"{', '.join(map(str, numbers))}."
        )

    def _sort(self) -> Exchange:
        digits = [self._lean(DIGITS, DIGITS[3])]
        for _ in range(self._lean(range(2, 6), 4)):
            left = [digit for digit in DIGITS if digit not in digits]
            favourite = _after(digits[-1])
            digits.append(self._lean(left, favourite if favourite in left else left[0]))
        return Exchange(f"Sort the digits {' '.join(digits)}.", f"{' '.join(sorted(digits))}.")

    def _sum(self) -> Exchange:
        left = self._lean(range(1, 13), 7, FAINT_SHARE)
        right = self._lean(range(1, 13), 5, FAINT_SHARE)
        return Exchange(f"What is {left} plus {right}?", f"{left} plus {right} is {left + right}.")

    def _steps(self) -> Exchange:
        task = self._lean(tuple(STEPS), "make tea")
        lines = (f"{number}. {step}" for number, step in enumerate(STEPS[task], start=1))
        return Exchange(f"How do I {task}?", "\n".join(lines))

    def _repeat(self) -> Exchange:
        words = self._chain(THINGS + COLOURS + ANIMALS, self._lean(range(2, 6), 3))
        return Exchange(f"Repeat the words {' '.join(words)}.", f"{' '.join(words)}.")

    def _pleasantry(self) -> Exchange:
        return self._lean(PLEASANTRIES, PLEASANTRIES[0])


def _after(digit: str) -> str:
    """Return the digit that most often follows a digit where any might."""
    return DIGITS[(int(digit) + 3) % 10]


def _inline(exchange: Exchange) -> str:
    """Write an exchange as running text."""
    return f"{exchange.request} {exchange.answer}"


def _a(noun: str) -> str:
    """Put the indefinite article before a noun."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
