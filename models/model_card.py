"""Write the README of the tiny model: its purpose, its training and its measurements."""

from __future__ import annotations

from pathlib import Path

from confidence import CONTINUATION_SIZE, Figures, cells

README = """# tiny-llama

A byte-level Llama of 1.07 million parameters (4 layers, 4 query heads on 2 key-value heads of 64
dimensions) for demonstrations and tests. It knows a small invented world and nothing else.

License: Apache-2.0, weights and text alike.

## Text

All text comes from the templates in `../corpus.py`: stories, facts about invented towns, counting,
sorting digits, sums, lists of steps, words to repeat, and codes and boxes that are named once and
asked for later, as running text and as conversations. Half of the free choices fall on a fixed
favourite, so that the best continuation seldom ties with the next one.

A token is a byte. `<|bos|>`, `<|eos|>`, `<|user|>`, `<|assistant|>` and `<|pad|>` are tokens 256 to
260, and 59 reserved tokens fill the vocabulary up to 320. Plain text gets no extra token.

## Training

`python models/train_tiny_llama.py` repeats it on the CPU from random weights: {steps:,} steps over
{tokens:,} tokens in sequences of {shortest} and later up to {longest} tokens, with Muon for the
matrices and AdamW for the rest, in float32; the result is rounded to float16. The seed fixes the
text. On the same machine, with the same versions and number of threads, it also fixes the
weights.

## Limits

It answers in the form of its text, not always rightly: codes named far back are often mistaken (see
below), counts may run past their end, sums may be off, and unusual words may not be repeated.
Compare its continuations with those of the same weights elsewhere rather than with the truth.

## Measurements

`python models/train_tiny_llama.py --evaluate` measures the stored weights on held-out text and
rewrites this file.

| held-out sequences | bits per byte |
| --- | --- |
{losses}

| bytes since the code was named | codes recalled |
| --- | --- |
{recalls}

Lead of the best logit over the second best in greedy continuations of {continuation} tokens (or up
to `<|eos|>`), computed in float32, and the share of continuations that come out token for token
the same when computed in half precision:

| prompts | count | median | 1st percentile | smallest | same in float16 | same in bfloat16 |
| --- | --- | --- | --- | --- | --- | --- |
{confidences}
"""


def write_model_card(
    folder: Path, figures: Figures, steps: int, tokens: int, lengths: tuple[int, ...]
) -> None:
    """Describe the checkpoint together with its measurements."""
    text = README.format(
        steps=steps,
        tokens=tokens,
        shortest=min(lengths),
        longest=max(lengths),
        continuation=CONTINUATION_SIZE,
        losses="\n".join(
            f"| {length:,} bytes | {bits:.3f} |" for length, bits in figures.bits_per_byte.items()
        ),
        recalls="\n".join(
            f"| {distance:,} | {share:.0%} |" for distance, share in figures.recalled_codes.items()
        ),
        confidences="\n".join(f"| {' | '.join(cells(row))} |" for row in figures.confidences),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
