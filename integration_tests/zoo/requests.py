"""The zoo's requests, and the check of one engine's answers against another's, token by token."""

import random

from benchmarks.e2e.answers import MOST_WRONG, gap_to, tolerance_of
from deft_backend.tools.harness.answers import first_difference


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


def check(engine, prompts, answers, dtype, kv_dtype=None):
    """Compare with what `engine` answers: counts of tokens, ties and wrong tokens.

    After a different token the engine continues from the checked answer, so the check covers every
    token. A different token that the engine finds as likely, up to rounding in `dtype` and
    in the KV cache's `kv_dtype`, is a tie.
    """
    found = {"tokens": 0, "wrong": 0, "ties": 0, "first_wrong": []}
    tolerance = tolerance_of(dtype, kv_dtype)
    at = dict.fromkeys(range(len(prompts)), 0)
    wrong = dict.fromkeys(at, 0)
    while at:
        asked = [(*prompts[index], *answers[index][:begin]) for index, begin in at.items()]
        lengths = [len(answers[index]) - begin for index, begin in at.items()]
        replies = engine.answer(asked, lengths)
        for (index, begin), expected in zip(list(at.items()), replies, strict=True):
            rest = answers[index][begin:]
            differs = first_difference(expected.ids, rest)
            found["tokens"] += len(rest) if differs is None else differs + 1
            if differs is not None:
                gap = gap_to(expected, differs, rest[differs])
                if gap is not None and gap <= tolerance:
                    found["ties"] += 1
                else:
                    found["wrong"] += 1
                    wrong[index] += 1
                    less = "not among the likeliest" if gap is None else f"{gap:.3g} less likely"
                    found["first_wrong"].append(
                        f"answer {index}, token {begin + differs}: {rest[differs]} instead of "
                        f"{expected.ids[differs]}, {less}"
                    )
                at[index] = begin + differs + 1
            if differs is None or at[index] >= len(answers[index]) or wrong[index] >= MOST_WRONG:
                del at[index]
    return found
