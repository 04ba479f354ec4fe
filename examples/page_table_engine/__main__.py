"""``python -m examples.page_table_engine PROMPT [PROMPT ...]``, in a checkout."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from examples.page_table_engine.engine import ATTENTIONS, Engine
from examples.page_table_engine.model import Llama

TINY_LLAMA = Path(__file__).parents[2] / "models" / "tiny-llama"
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}


def main() -> None:
    """Answer the prompts together, print the tokens as they arrive, and report the KV read."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m examples.page_table_engine")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--model", type=Path, default=TINY_LLAMA, help="folder of a plain Llama")
    parser.add_argument("--attention", choices=ATTENTIONS, default="tree")
    parser.add_argument("--dtype", choices=DTYPES, default="float16" if on_gpu else "float32")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if not (given.model / name).is_file():
            parser.error(f"--model {given.model} has no {name}; expected a folder with a Llama")
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    try:
        device = torch.device("cuda" if on_gpu else "cpu")
        engine = Engine(Llama(given.model, DTYPES[given.dtype], device), attention=given.attention)
        answers: dict[int, list[int]] = {
            engine.add(tokenizer.encode(prompt).ids, given.max_new_tokens): []
            for prompt in given.prompts
        }
    except ValueError as error:
        parser.error(str(error))

    def table() -> Table:
        shown = Table("prompt", "answer", show_lines=True)
        for prompt, tokens in zip(given.prompts, answers.values(), strict=True):
            shown.add_row(Text(prompt), Text(tokenizer.decode(tokens)))
        return shown

    with Live(table()) as live:
        while not engine.is_idle:
            for request, token in engine.step():
                answers[request].append(token)
            live.update(table())
    if on_gpu:
        torch.cuda.synchronize()
    counts = engine.state.counters()
    read, query_guided = (
        f"{count / 1e6:.1f} MB" for count in (counts.kv_bytes_read, counts.kv_bytes_query_guided)
    )
    print(
        f"\n{counts.decode_steps} decode steps, {counts.steps_tree} through tree attention; "
        f"KV read: {read}; query by query: {query_guided}"
    )


if __name__ == "__main__":
    main()
