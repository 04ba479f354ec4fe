"""Make or measure the tiny Llama checkpoint that the demo and the integration tests serve.

Training starts from random weights and invented text (see ``corpus.py``), so nothing has to be
downloaded, and the seed decides the outcome. Evaluation measures what the tests rely on: a
greedy continuation must not hang on numerical noise, so the best token has to lead the second
best one clearly, after short prompts as well as after long ones.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from corpus import Message, Writer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
VOCABULARY_SIZE = 320
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>") + tuple(
    f"<|reserved_{number}|>" for number in range(VOCABULARY_SIZE - 260)
)
CONTEXT_SIZE = 16384
# The text has recalls over thousands of bytes. A high base leaves half of the rotary
# dimensions nearly still over that distance, so that attention can match by content alone.
ROPE_THETA = 100_000.0
HELD_OUT_SEED = 1_000_000_000
CONTINUATION_SIZE = 64

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% set ns = namespace(note='') %}"
    "{% for message in messages %}"
    "{% if message['content'] is string %}{% set text = message['content'] %}"
    "{% else %}{% set text = message['content'] | map(attribute='text') | join %}{% endif %}"
    "{% if message['role'] == 'system' %}{% set ns.note = text + '\\n\\n' %}"
    "{% elif message['role'] == 'user' %}"
    "{{ '<|user|>' + ns.note + text }}{% set ns.note = '' %}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + text + '<|eos|>' }}"
    "{% else %}{{ raise_exception('role must be system, user or assistant') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

ARCHITECTURE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT_SIZE,
    # transformers 4 reads the first of each pair, transformers 5 the second.
    "rope_theta": ROPE_THETA,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    "torch_dtype": "float16",
    "dtype": "float16",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "use_cache": True,
}


@dataclass(frozen=True)
class Stage:
    """A stretch of training: batches of ``batch_tokens``, each of one of the ``lengths``."""

    steps: int
    batch_tokens: int
    lengths: tuple[int, ...]


# Short sequences first: the model learns to spell and to copy cheaply before it has to look
# back far. The last stage reaches the lengths at which the integration tests prompt.
STAGES = (
    Stage(steps=700, batch_tokens=4096, lengths=(512,)),
    Stage(steps=340, batch_tokens=8192, lengths=(512, 1024, 2048)),
    Stage(steps=70, batch_tokens=12288, lengths=(2048, 6144)),
)


@dataclass(frozen=True)
class Continuation:
    """Greedily chosen tokens and how far each one led the second best token."""

    tokens: list[int]
    margins: list[float]


@dataclass(frozen=True)
class Margins:
    """How confident the continuations of one kind of prompt were."""

    prompts: str
    count: int
    median: float
    first_percentile: float
    smallest: float
    same_in_float16: float
    same_in_bfloat16: float


@dataclass(frozen=True)
class Figures:
    """What an evaluation measured."""

    bits_per_byte: dict[int, float]
    recalled_codes: dict[str, float]
    margins: list[Margins]


app = typer.Typer(add_completion=False)
console = Console()


def build_tokenizer() -> Tokenizer:
    """Return a tokenizer in which the tokens of a text are the bytes of its UTF-8 form."""
    tokenizer = Tokenizer(BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """Map the printable stand-in that ByteLevel uses for each byte to the byte's value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins.update({byte: chr(256 + position) for position, byte in enumerate(others)})
    return {stand_ins[byte]: byte for byte in range(256)}


def encode_conversation(messages: list[Message]) -> list[int]:
    """Return the tokens that ``CHAT_TEMPLATE`` gives for a conversation."""
    tokens, note = [BOS], ""
    for message in messages:
        if message.role == "system":
            note = f"{message.content}\n\n"
        elif message.role == "user":
            tokens += [USER, *f"{note}{message.content}".encode()]
            note = ""
        else:
            tokens += [ASSISTANT, *message.content.encode(), EOS]
    return tokens


def write_sequence(seed: int, length: int) -> list[int]:
    """Return exactly ``length`` tokens of conversation, of one text, or of several texts."""
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


def write_batches(seed: int) -> Iterator[torch.Tensor]:
    """Yield the training batches of all stages, in order."""
    chance = random.Random(seed)
    for stage in STAGES:
        for _ in range(stage.steps):
            length = chance.choice(stage.lengths)
            rows = stage.batch_tokens // length
            # Training seeds stay below the held-out ones.
            seeds = [chance.randrange(HELD_OUT_SEED) for _ in range(rows)]
            yield torch.tensor([write_sequence(row_seed, length) for row_seed in seeds])


def next_token_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, in nats, of every token given those before it."""
    logits: torch.Tensor = model(input_ids=batch[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def train(seed: int) -> LlamaForCausalLM:
    """Train a model from random weights."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**ARCHITECTURE, "dtype": "float32"})).float()
    model.train()
    # Muon learns the matrices in far fewer steps than Adam does; the embedding tables and the
    # norms are not matrices in its sense.
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in named if not (p.ndim == 2 and ".layers." in name)]
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.05),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0),
    )
    total = sum(stage.steps for stage in STAGES)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate(step / total))
        for optimizer in optimizers
    ]
    smooth, started = math.log(VOCABULARY_SIZE), time.monotonic()
    with Progress(*Progress.get_default_columns(), console=console) as progress:
        bar = progress.add_task("training", total=total)
        for step, batch in enumerate(write_batches(seed), start=1):
            loss = next_token_loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            smooth += 0.05 * (loss.item() - smooth)
            progress.update(bar, advance=1)
            if step % 50 == 0 or step == total:
                bits, minutes = smooth / math.log(2), (time.monotonic() - started) / 60
                progress.console.print(
                    f"step {step}/{total}: {bits:.3f} bits per byte, {minutes:.1f} minutes"
                )
    return model.eval()


def _learning_rate(progress: float) -> float:
    """Warm up, hold, then fall to nearly nothing, as a share of the peak rate."""
    return min(1.0, 0.1 + progress / 0.03, 0.02 + 1.6 * (1.0 - progress))


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the checkpoint without its README."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.half().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|eos|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_SIZE,
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "do_sample": False,
    }
    _write_json(folder / "config.json", ARCHITECTURE)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", generation_config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """Read the checkpoint and compute with it in ``dtype``."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = LlamaForCausalLM(LlamaConfig(**content))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(dtype).eval()


@torch.inference_mode()
def continue_greedily(model: LlamaForCausalLM, prompt: list[int]) -> Continuation:
    """Follow the best token for ``CONTINUATION_SIZE`` tokens, or up to the end of an answer."""
    tokens: list[int] = []
    margins: list[float] = []
    cache = DynamicCache(config=model.config)
    inputs = torch.tensor([prompt])
    while len(tokens) < CONTINUATION_SIZE and tokens[-1:] != [EOS]:
        output = model(
            input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        best, second = output.logits[0, -1].float().topk(2).values.tolist()
        margins.append(best - second)
        tokens.append(int(output.logits[0, -1].argmax()))
        inputs = torch.tensor([tokens[-1:]])
    return Continuation(tokens, margins)


def held_out_prompts() -> dict[str, list[list[int]]]:
    """Return prompts of each kind that are cut, like real ones, where something must follow."""
    chance = random.Random(HELD_OUT_SEED)
    seeds = iter(range(HELD_OUT_SEED, HELD_OUT_SEED + 10_000))
    texts = [
        list(Writer(next(seeds)).document(600).encode())[: chance.randrange(120, 600)]
        for _ in range(48)
    ]
    chats = []
    for _ in range(32):
        tokens = encode_conversation(Writer(next(seeds)).conversation(chance.randrange(60, 600)))
        answers = [place for place, token in enumerate(tokens) if token == ASSISTANT]
        chats.append(tokens[: answers[-1] + 1])
    long_texts = [
        list(Writer(next(seeds)).document(6200).encode())[: chance.randrange(2000, 6000)]
        for _ in range(24)
    ]
    gathered = [
        list("\n\n".join(Writer(next(seeds)).document(500) for _ in range(count)).encode())
        for count in (4, 6, 8, 10, 4, 6, 8, 10)
    ]
    return {
        "texts of 120-600 bytes": texts,
        "conversations": chats,
        "texts of 2,000-6,000 bytes": long_texts,
        "4-10 texts in a row, 2,000-6,000 bytes": gathered,
    }


@torch.inference_mode()
def bits_per_byte(model: LlamaForCausalLM, length: int) -> float:
    """Return the loss on held-out sequences of a length."""
    rows = max(2, 49152 // length)
    losses = []
    for row in range(rows):
        sequence = write_sequence(2 * HELD_OUT_SEED + row, length)
        losses.append(next_token_loss(model, torch.tensor([sequence])).item())
    return sum(losses) / rows / math.log(2)


def recalled_share(model: LlamaForCausalLM, distance: int) -> float:
    """Return the share of codes given correctly ``distance`` bytes after they were named."""
    chance = random.Random(HELD_OUT_SEED + distance)
    right, asked = 0, 24
    for number in range(asked):
        code = str(chance.randrange(1000, 10000))
        # These texts never name the key that is asked for, so that only one answer exists.
        between = ""
        seed = 3 * HELD_OUT_SEED + 1000 * number
        while len(between) < distance:
            text = Writer(seed := seed + 1).document(400)
            between += "" if "HARBOR" in text else f"{text}\n\n"
        prompt = f"The code of HARBOR is {code}.\n\n{between}What is the code of HARBOR?"
        answer = bytes(
            token for token in continue_greedily(model, list(prompt.encode())).tokens if token < 256
        )
        right += answer.startswith(f" The code of HARBOR is {code}.".encode())
    return right / asked


def evaluate(folder: Path) -> Figures:
    """Measure the stored checkpoint."""
    exact = load(folder, torch.float32)
    half, brain = load(folder, torch.float16), load(folder, torch.bfloat16)
    margins = []
    for name, prompts in held_out_prompts().items():
        with console.status(f"continuing {name}"):
            runs = [continue_greedily(exact, prompt) for prompt in prompts]
            same_half = [
                continue_greedily(half, prompt).tokens == run.tokens
                for prompt, run in zip(prompts, runs, strict=True)
            ]
            same_brain = [
                continue_greedily(brain, prompt).tokens == run.tokens
                for prompt, run in zip(prompts, runs, strict=True)
            ]
        pooled = torch.tensor([margin for run in runs for margin in run.margins])
        margins.append(
            Margins(
                prompts=name,
                count=len(prompts),
                median=pooled.median().item(),
                first_percentile=pooled.quantile(0.01).item(),
                smallest=pooled.min().item(),
                same_in_float16=sum(same_half) / len(prompts),
                same_in_bfloat16=sum(same_brain) / len(prompts),
            )
        )
    with console.status("measuring loss and recall"):
        return Figures(
            bits_per_byte={length: bits_per_byte(exact, length) for length in (512, 2048, 6144)},
            recalled_codes={
                f"{distance} bytes": recalled_share(exact, distance)
                for distance in (200, 1000, 2000, 4000)
            },
            margins=margins,
        )


def show(figures: Figures) -> None:
    """Print the figures as tables."""
    for length, bits in figures.bits_per_byte.items():
        console.print(f"held-out sequences of {length} bytes: {bits:.3f} bits per byte")
    for distance, share in figures.recalled_codes.items():
        console.print(f"codes recalled after {distance}: {share:.0%}")
    table = Table("prompts", "count", "median", "1st percentile", "smallest", "float16", "bfloat16")
    for row in figures.margins:
        table.add_row(*_cells(row))
    console.print(table)


def _cells(row: Margins) -> tuple[str, ...]:
    return (
        row.prompts,
        str(row.count),
        f"{row.median:.2f}",
        f"{row.first_percentile:.2f}",
        f"{row.smallest:.3f}",
        f"{row.same_in_float16:.0%}",
        f"{row.same_in_bfloat16:.0%}",
    )


README = """# tiny-llama

A byte-level Llama of {parameters:,} parameters (4 layers, 4 query heads on 2 key-value heads of
64 dimensions) for demonstrations and tests. It knows a small invented world and nothing else.

License: Apache-2.0, weights and text alike.

## Text

All text comes from the templates in `../corpus.py`: stories, facts about invented towns, counting,
sorting digits, sums, lists of steps, words to repeat, and codes and boxes that are named once and
asked for later, as running text and as conversations. Half of the free choices fall on a fixed
favourite, so the best continuation seldom ties with the next one.

A token is a byte; `<|bos|>`, `<|eos|>`, `<|user|>` and `<|assistant|>` are tokens 256 to 259, and
60 reserved tokens fill the vocabulary up to 320. No token is added to plain text.

## Training

`python models/train_tiny_llama.py` repeats it on the CPU: {steps:,} steps over {tokens:,} tokens,
in sequences of {shortest} and later up to {longest} tokens, with Muon for the matrices and AdamW
for the rest, in float32; the result is rounded to float16. The seed fixes the text, and the weights
for the same versions and thread count.

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
to `<|eos|>`), and the share of continuations that come out the same when the model computes in half
precision instead of float32:

| prompts | count | median | 1st percentile | smallest | same in float16 | same in bfloat16 |
| --- | --- | --- | --- | --- | --- | --- |
{margins}
"""


def write_readme(folder: Path, figures: Figures) -> None:
    """Describe the checkpoint together with what was measured on it."""
    lengths = [length for stage in STAGES for length in stage.lengths]
    text = README.format(
        parameters=sum(w.numel() for w in load_file(folder / "model.safetensors").values()),
        steps=sum(stage.steps for stage in STAGES),
        tokens=sum(stage.steps * stage.batch_tokens for stage in STAGES),
        shortest=min(lengths),
        longest=max(lengths),
        continuation=CONTINUATION_SIZE,
        losses="\n".join(
            f"| {length} bytes | {bits:.3f} |" for length, bits in figures.bits_per_byte.items()
        ),
        recalls="\n".join(
            f"| {distance} | {share:.0%} |" for distance, share in figures.recalled_codes.items()
        ),
        margins="\n".join(f"| {' | '.join(_cells(row))} |" for row in figures.margins),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def check_rounding(model: LlamaForCausalLM, folder: Path) -> None:
    """Report how many greedy continuations survive the rounding of the weights to float16."""
    rounded = load(folder, torch.float32)
    prompts = [prompt for group in held_out_prompts().values() for prompt in group]
    same = sum(
        continue_greedily(model, prompt).tokens == continue_greedily(rounded, prompt).tokens
        for prompt in prompts
    )
    console.print(f"{same} of {len(prompts)} continuations are the same after rounding")


def sample(folder: Path) -> None:
    """Print a few continuations, to be read."""
    model, tokenizer = load(folder, torch.float32), build_tokenizer()
    for prompts in held_out_prompts().values():
        for prompt in prompts[:4]:
            answer = tokenizer.decode(
                continue_greedily(model, prompt).tokens, skip_special_tokens=False
            )
            tail = tokenizer.decode(prompt[-160:], skip_special_tokens=False)
            console.print(tail, style="dim", end="", markup=False, highlight=False)
            console.print(answer, style="bold green", markup=False, highlight=False)
            console.rule()


@app.command()
def main(
    folder: Annotated[
        Path, typer.Option(help="Folder of the checkpoint.", file_okay=False)
    ] = Path(__file__).parent / "tiny-llama",
    evaluation: Annotated[
        bool, typer.Option("--evaluate", help="Measure the stored checkpoint; do not train.")
    ] = False,
    samples: Annotated[
        bool, typer.Option("--samples", help="Also print a few continuations.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the text and the weights.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads to compute with.")] = 2,
) -> None:
    """Train the tiny Llama from scratch and measure it, or only measure the stored one."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    if evaluation:
        if not (folder / "model.safetensors").is_file():
            raise typer.BadParameter(
                f"'{folder}' has no model.safetensors; name a folder that holds the checkpoint.",
                param_hint="--folder",
            )
    else:
        model = train(seed)
        save(model, folder)
        check_rounding(model, folder)
    figures = evaluate(folder)
    show(figures)
    write_readme(folder, figures)
    if samples:
        sample(folder)


if __name__ == "__main__":
    app()
