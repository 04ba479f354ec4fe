"""`deft warm`: compile a server's kernels before it starts, on any machine: it needs no GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Option

from deft_backend.cli.errors import checked_settings, fail, reported, say
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.cli.shapes import (
    HeadDimOption,
    ShapeModelOption,
    chosen_shape,
    eight_bit_cache,
    this_device,
)
from deft_backend.files.folders import create_private, kernels_directory

if TYPE_CHECKING:
    from deft_backend.hosts.common.described_server import DescribedServer
    from deft_backend.hosts.common.warm_up import Drafts
    from deft_backend.kernels import Gpu
    from deft_backend.settings.config import Settings


_PAGE_SIZES = {"sglang": 1, "vllm": 16}  # on a GPU, unless the host's arguments say otherwise


def warm(
    model: ShapeModelOption = None,
    heads: Annotated[str | None, Option(help="The model's query/KV heads; default: 32/8.")] = None,
    head_dim: HeadDimOption = None,
    dtype: Annotated[str | None, Option(help="fp16 or bf16; default: the model's or bf16.")] = None,
    tensor_parallel: Annotated[int, Option(min=1, help="GPUs that divide the heads.")] = 1,
    host: HostOption = None,
    page_size: Annotated[
        int | None, Option(min=1, help="Tokens a page; default: 1 (SGLang), 16 (vLLM).")
    ] = None,
    max_batch: Annotated[int, Option(min=1, help="Most requests that decode at once.")] = 2048,
    kv_cache_dtype: Annotated[
        str, Option(help="The server's: auto, fp8, fp8_e4m3 or fp8_e5m2.")
    ] = "auto",
    draft_tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="Draft tokens of a server that speculates: SGLang's "
            "--speculative-num-draft-tokens, vLLM's num_speculative_tokens.",
        ),
    ] = None,
    draft_trees: Annotated[
        bool,
        Option(
            "--draft-trees",
            help="They form trees: SGLang with NGRAM, or with --speculative-eagle-topk above 1.",
        ),
    ] = False,
    target: Annotated[str | None, Option(help="GPU such as sm_90; default: this one's.")] = None,
    out: Annotated[
        Path | None,
        Option(help="Folder to fill; default: DEFT_KERNEL_CACHE, or `kernels` in the cache."),
    ] = None,
) -> None:
    """Compile a server's kernels into a folder, from which it takes them when it starts.

    A GPU is needed only if --target names none.
    """
    import torch

    from deft_backend.hosts.common.described_server import DescribedServer
    from deft_backend.hosts.common.warm_up import LayerKind

    settings = checked_settings()
    host = chosen_host(host, needed=False)
    if host == "sglang" and page_size not in (None, 1):
        raise fail(f"--page-size is {page_size}; SGLang's adapter works with pages of 1 token")
    drafts, eight_bits = _drafts(host, draft_tokens, draft_trees), eight_bit_cache(kv_cache_dtype)
    shape = chosen_shape(model, heads, head_dim, dtype, default_dtype="bf16")
    if shape.dtype == "float32":  # hosts serve such checkpoints in 16 bits
        raise fail("the model's dtype is float32; pass --dtype with the server's, fp16 or bf16")
    if shape.query_heads % tensor_parallel:
        raise fail(
            f"--tensor-parallel is {tensor_parallel}; expected a divisor of the "
            f"{shape.query_heads} query heads"
        )
    kind = getattr(torch, shape.dtype)
    # SGLang's models hold sinks in bfloat16, vLLM's in the server's dtype.
    sinks = torch.bfloat16 if host == "sglang" else kind
    server = DescribedServer(
        host,
        shape.query_heads // tensor_parallel,
        max(1, shape.kv_heads // tensor_parallel),  # each GPU has a KV head that several need
        shape.head_dim,
        kind,
        page_size or _PAGE_SIZES[host],
        max_batch,
        kv_dtype=None if eight_bits is None else getattr(torch, eight_bits),
        drafts=drafts,
        layers=(LayerKind(shape.soft_cap, sinks if shape.sinks else None),),
    )
    _fill(out or kernels_directory(settings), out, server, _gpu(target), settings)


def _drafts(host: str, tokens: int | None, trees: bool) -> Drafts | None:
    """What the server verifies; refuses arguments that the host does not accept."""
    from deft_backend.hosts.common.warm_up import Drafts
    from deft_backend.shapes import MAX_QUERY_TOKENS

    if tokens is None:
        if not trees:
            return None
        raise fail(
            "--draft-trees is given without --draft-tokens; pass --draft-tokens with the server's "
            "--speculative-num-draft-tokens"
        )
    if trees and host == "vllm":
        raise fail("--draft-trees is given, but vLLM verifies chains only; leave it out")
    least = 1 + (host == "sglang")  # which counts the token before the drafts
    most = MAX_QUERY_TOKENS - (host == "vllm")
    if not least <= tokens <= most:
        raise fail(
            f"--draft-tokens is {tokens}; expected {least} to {most}, the most that the kernels "
            "verify for a request"
        )
    if host == "sglang":
        return Drafts(tokens, trees=trees, always=True)
    return Drafts(tokens + 1, ragged=True)  # a request may have fewer drafts, or none


def _gpu(target: str | None) -> Gpu:
    from deft_backend.kernels import Gpu

    if target is not None:
        try:
            return Gpu.named(target)
        except ValueError as error:
            raise fail(f"--target is {error}") from None
    device = this_device()
    if device.type != "cuda":
        raise fail(
            "deft warm compiles for this machine's NVIDIA GPU, and this machine has none; pass "
            "--target with the server's, such as sm_90 for H100 and H200"
        )
    return Gpu.at(device)


def _fill(
    folder: Path, out: Path | None, server: DescribedServer, gpu: Gpu, settings: Settings
) -> None:
    from triton import knobs

    from deft_backend.attention import AttentionError
    from deft_backend.compile.kernel_folder import KernelFolderError, Origin, check_fillable, fill
    from deft_backend.compile.variants import compile_all, compiling_for
    from deft_backend.policies import PolicyError

    console = Console()
    try:
        check_fillable(folder)
    except KernelFolderError as error:
        raise fail(f"cannot fill {folder}: {error}; use --out with another folder") from None
    with reported(AttentionError, PolicyError):
        variants = server.variants(gpu, settings)
    say(console, f"{len(variants)} kernels for {gpu.name}: {server}")
    # A cache of its own: what the folder gets does not depend on what this machine has compiled.
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope(), compiling_for(gpu.arch):
        knobs.cache.dir = cache
        done = compile_all(variants)
        try:
            if folder != out:  # in the user's cache, or named by a setting
                create_private(folder)
            held = fill(folder, Origin.of(gpu.name), done.kernels)
        except OSError as error:
            raise fail(
                f"cannot write {folder}: {error.strerror}; use --out or DEFT_KERNEL_CACHE"
            ) from None
    say(console, str(done))
    say(console, f"{folder} holds {held} kernels")
