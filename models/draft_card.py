"""Write the README of the draft model: its purpose, its training and its acceptance."""

from __future__ import annotations

from pathlib import Path

from acceptance import DRAFT_TOKENS

README = """# tiny-draft

A byte-level Llama of 165,000 parameters (2 layers, 2 query heads on 1 key-value head of 64
dimensions). It is the draft model of `../tiny-llama`: it guesses the tokens that `tiny-llama`
verifies. Demonstrations and tests of speculative decoding use it.

License: Apache-2.0.

It has the vocabulary of `tiny-llama` and learned from the same invented text.
`python models/train_tiny_llama.py --draft` repeats the training on the CPU: {steps:,} steps over
{tokens:,} tokens. The weights are rounded to float16.

## Acceptance

Greedy speculation with chains of {chain} draft tokens, on held-out prompts, computed in float32.
`python models/train_tiny_llama.py --draft --evaluate` measures it and rewrites this file.

| prompts | accepted draft tokens |
| --- | --- |
{shares}
"""


def write_draft_card(folder: Path, accepted: dict[str, float], steps: int, tokens: int) -> None:
    """Describe the draft model together with its acceptance."""
    text = README.format(
        steps=steps,
        tokens=tokens,
        chain=DRAFT_TOKENS,
        shares="\n".join(f"| {name} | {share:.0%} |" for name, share in accepted.items()),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
