"""A real server on a GPU, many branches on one long prefix: answers and time per output token.

``python -m deft_backend.bench.served_prefix --out FILE`` writes a checkpoint of the shape of
Llama-3.1-8B with random weights, scaled so that attention is neither uniform nor one-hot (a host's
dummy weights are so small that attention does not reach the logits), starts the host once for each
backend, sends every server the same token ids and compares the answers with the first one's.

Greedy answers of random weights part where two tokens are equally likely up to bfloat16 rounding.
How far two backends of the host itself differ says what that noise is: pass one beside ours.
"""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from safetensors.torch import save_file

from deft_backend.bench.provenance import provenance
from deft_backend.hosts.launch import free_port, server_command
from deft_backend.hosts.server_process import ServerProcess

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""The published shape of Llama-3.1-8B."""

SHARPNESS = 1.5
"""Standard deviation of q and k elements: scores spread by its square."""


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write random weights under CONFIG, one file a layer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    hidden, inner, dim = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    kv, vocab = CONFIG["num_key_value_heads"] * dim, CONFIG["vocab_size"]

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        weight = torch.randn(rows, columns, generator=generator, device=device)
        return (weight * scale).to(torch.bfloat16).cpu()

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    unit = hidden**-0.5
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        save_file(
            {
                name + "self_attn.q_proj.weight": normal(hidden, hidden, SHARPNESS * unit),
                name + "self_attn.k_proj.weight": normal(kv, hidden, SHARPNESS * unit),
                name + "self_attn.v_proj.weight": normal(kv, hidden, 4 * unit),
                name + "self_attn.o_proj.weight": normal(hidden, hidden, unit),
                name + "mlp.gate_proj.weight": normal(inner, hidden, unit),
                name + "mlp.up_proj.weight": normal(inner, hidden, unit),
                name + "mlp.down_proj.weight": normal(hidden, inner, inner**-0.5),
                name + "input_layernorm.weight": ones.clone(),
                name + "post_attention_layernorm.weight": ones.clone(),
            },
            folder / f"layer-{layer:02d}.safetensors",
        )
    save_file(
        {
            "model.embed_tokens.weight": normal(vocab, hidden, 1.0),
            "model.norm.weight": ones.clone(),
            "lm_head.weight": normal(vocab, hidden, 3 * unit),
        },
        folder / "head.safetensors",
    )


def generate(port: int, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Greedy answers of the host's own endpoint, with the log-probabilities of five tokens."""
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 5,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answers: list[dict[str, Any]] = json.loads(response.read())
    return answers


def measure(port: int, prompts: list[list[int]], tokens: int) -> tuple[list[dict[str, Any]], float]:
    """Answers, and the median time per output token in milliseconds."""
    generate(port, prompts[:1], 1)  # what is shared enters the tree
    answers = generate(port, prompts, tokens)
    times = []
    for _ in range(3):
        seconds = []
        for count in (1, tokens):
            began = time.perf_counter()
            generate(port, prompts, count)
            seconds.append(time.perf_counter() - began)
        times.append((seconds[1] - seconds[0]) / (tokens - 1) * 1e3)
    return answers, sorted(times)[1]


def agreement(reference: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, Any]:
    """How far two servers' answers agree, up to where greedy decoding parts."""
    differences, gaps, equal = [], [], 0
    for ours, theirs in zip(other, reference, strict=True):
        a, b = (x["meta_info"]["output_token_logprobs"] for x in (ours, theirs))
        parted = next((i for i in range(len(b)) if a[i][1] != b[i][1]), None)
        equal += parted is None
        differences += [abs(x[0] - y[0]) for x, y in zip(a[:parted], b[:parted], strict=True)]
        if parted is not None:  # how much likelier the reference finds its own token
            top = {
                token: lp for lp, token, *_ in theirs["meta_info"]["output_top_logprobs"][parted]
            }
            gaps.append(b[parted][0] - top[a[parted][1]] if a[parted][1] in top else None)
    ordered = sorted(differences)
    return {
        "requests": len(other),
        "equal_answers": equal,
        "compared_tokens": len(ordered),
        "logprob_difference_median": ordered[len(ordered) // 2] if ordered else None,
        "logprob_difference_p99": ordered[int(len(ordered) * 0.99)] if ordered else None,
        "logprob_difference_max": ordered[-1] if ordered else None,
        "gap_where_parted_max": max((g for g in gaps if g is not None), default=None),
        "parted_outside_top_5": sum(gap is None for gap in gaps),
    }


def parse_case(text: str) -> tuple[int, int, int]:
    """``PREFIX,BRANCHES,SUFFIX`` in tokens, requests, tokens."""
    try:
        prefix, branches, suffix = (int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}; expected PREFIX,BRANCHES,SUFFIX") from None
    return prefix, branches, suffix


def options_of(name: str, sizes: list[int]) -> tuple[str, list[str]]:
    """Attention backend and host options of ``NAME`` (eager) or ``NAME+graphs``."""
    kernel, _, graphs = name.partition("+")
    options = ["--skip-tokenizer-init", "--sampling-backend", "pytorch"]
    if not graphs:
        return kernel, [*options, "--disable-cuda-graph"]
    bs = [str(size) for size in sorted({1, *sizes})]
    options += ["--cuda-graph-backend-prefill=disabled", "--cuda-graph-bs-decode", *bs]
    return kernel, options


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    case: Annotated[
        list[str] | None, typer.Option(help="PREFIX,BRANCHES,SUFFIX; may be repeated.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to decode.")] = 32,
    backend: Annotated[
        list[str] | None, typer.Option(help="First the reference; `NAME+graphs` keeps CUDA graphs.")
    ] = None,
    logs: Annotated[Path, typer.Option(help="Folder for the servers' logs.")] = Path("logs"),
) -> None:
    """Serve many branches on one prefix with each backend and compare answers and times."""
    console = Console(stderr=True)
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        found: list[int] = torch.randint(0, 128000, (count,), generator=generator).tolist()
        return found

    cases = [parse_case(text) for text in case or ["16384,64,64"]]
    prompts = []
    for prefix, branches, suffix in cases:
        shared = ids(prefix)
        prompts.append([shared + ids(suffix) for _ in range(branches)])
    rows: list[dict[str, Any]] = []
    reference: dict[int, tuple[str, list[dict[str, Any]]]] = {}
    head = {**provenance(), "model": "Llama-3.1-8B shape, random weights, bfloat16"}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        console.print("checkpoint written")
        for name in backend or ["fa3", "triton", "deft"]:
            kernel, options = options_of(name, [branches for _, branches, _ in cases])
            command = server_command(
                folder, free_port(), backend=kernel, host_arguments=options,
                environment={"DEFT_STATE_DIR": str(logs / "state")},
            )  # fmt: skip
            with ServerProcess(command, logs / f"{name}.log", timeout=500):
                for number, (prefix, branches, suffix) in enumerate(cases):
                    answers, tpot = measure(command.port, prompts[number], tokens)
                    first, theirs = reference.setdefault(number, (name, answers))
                    row = {
                        "workload": "few-shot" if prefix else "unshared", "prefix": prefix,
                        "branches": branches, "suffix": suffix, "gen": tokens, "backend": name,
                        "tpot_ms": round(tpot, 3),
                    }  # fmt: skip
                    if theirs is not answers:
                        row |= {"against": first, **agreement(theirs, answers)}
                    rows.append(row)
                    console.print(row)
                    lines = ",\n  ".join(json.dumps(row) for row in rows)
                    text = json.dumps(head, indent=1)
                    out.write_text(f'{{"header": {text},\n "rows": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    typer.run(main)
