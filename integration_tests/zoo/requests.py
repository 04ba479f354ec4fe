"""The zoo's requests, and the check of one engine's answers against another's, token by token."""

import random

from benchmarks.e2e.answers import Checked, answer_check, next_question


def requests(ids, prefix, branch, leaves, tokens):
    """A prompt that fills the prefix cache, the prompts that decode at once, and tokens of each.

    Two branches of a prefix, each with `leaves` prompts; one prompt twice, and one that shares
    nothing. Prompts use token ids below `ids`.
    """
    choose = random.Random(ids)

    def draw(count):
        return tuple(choose.randrange(8, ids) for _ in range(count))

    root = draw(prefix)
    branches = [root + draw(branch) for _ in range(2)]
    prompts = [way + draw(choose.randint(1, 12)) for way in branches for _ in range(leaves)]
    return root, (*prompts, prompts[0], draw(prefix // 2)), tokens


def check(engine, prompts, answers, tolerance):
    """Compare with what `engine` answers, all answers in a batch; returns the counts."""
    found = Checked()
    asked = {
        each: next_question(each, None)
        for each in (
            answer_check(number, prompt, answer, tolerance, found)
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        )
    }
    while asked := {each: question for each, question in asked.items() if question is not None}:
        replies = engine.answer(*map(list, zip(*asked.values(), strict=True)))
        pairs = zip(asked, replies, strict=True)
        asked = {each: next_question(each, reply) for each, reply in pairs}
    return found
