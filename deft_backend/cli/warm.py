"""`deft warm`: compile a server's kernels before it starts, on any machine: it needs no GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from rich.console import Console
from typer import Option

from deft_backend.cli.errors import checked_settings, fail, reported, say
from deft_backend.cli.models import chosen_model
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.cli.shapes import (
    HeadDimOption,
    HeadShape,
    LatentHeads,
    ShapeModelOption,
    check_dtype,
    check_one_shape,
    chosen_shape,
    model_attention,
    this_device,
)
from deft_backend.files.folders import create_private, kernels_directory
from deft_backend.hosts.windows import TESTED
from deft_backend.settings.policy_names import AUTO
from deft_backend.shapes import ROPE_DIM, SHORT_DTYPES, VALUE_DIM

if TYPE_CHECKING:
    from deft_backend.hosts.common.described_server import DescribedLatentServer, DescribedServer
    from deft_backend.hosts.common.warm_up import Drafts
    from deft_backend.kernels import Gpu
    from deft_backend.settings.config import Settings


_PAGE_SIZES = {"sglang": 1, "vllm": 16}  # on a GPU, unless the host's arguments say otherwise

_KV_CACHES = {
    "sglang": ("auto", "fp8_e4m3", "fp8_e5m2"),
    "vllm": ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
}
"""KV caches that the kernels read, in each host's own words."""


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
        str, Option(help="The server's: auto, fp8_e4m3, fp8_e5m2; vLLM: also fp8.")
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
    threads: Annotated[int | None, Option(min=1, help="Threads; default: one a CPU.")] = None,
    out: Annotated[
        Path | None,
        Option(help="Folder to fill; default: DEFT_KERNEL_CACHE, or `kernels` in the cache."),
    ] = None,
) -> None:
    """Compile a server's kernels into a folder, from which it takes them when it starts.

    A GPU is needed only if --target names none.
    """
    settings = checked_settings()
    check_dtype(dtype)
    host = chosen_host(host, needed=False)
    if host == "sglang" and page_size not in (None, 1):
        raise fail(f"--page-size is {page_size}; SGLang's adapter works with pages of 1 token")
    if kv_cache_dtype not in _KV_CACHES[host]:
        raise fail(
            f"--kv-cache-dtype is {kv_cache_dtype!r}; expected one of "
            f"{', '.join(_KV_CACHES[host])}: pass the server's, or auto for a KV cache in the "
            "model's dtype"
        )
    page_size, drafts = page_size or _PAGE_SIZES[host], _drafts(host, draft_tokens, draft_trees)
    found = None if model is None else model_attention(chosen_model(model))
    served = _Served(host, page_size, max_batch, tensor_parallel, kv_cache_dtype, drafts)
    described: DescribedServer | DescribedLatentServer
    if found is None:
        found = chosen_shape(None, heads, head_dim, dtype, default_dtype="bf16")
    else:
        check_one_shape(heads, head_dim)
    if isinstance(found, LatentHeads):
        found = found._replace(dtype=_served_dtype(found.dtype, dtype))
        described = described_latent(found, settings, served)
    else:
        described = _described(found._replace(dtype=_served_dtype(found.dtype, dtype)), served)
    _fill(out or kernels_directory(settings), out, described, target, threads, settings)


def _served_dtype(held: str, asked: str | None) -> str:
    if asked is not None:
        return SHORT_DTYPES[asked]
    if held == "float32":  # hosts serve such checkpoints in 16 bits
        raise fail("the model's dtype is float32; pass --dtype with the server's, fp16 or bf16")
    return held


class _Served(NamedTuple):
    host: str
    page_size: int
    max_batch: int
    tensor_parallel: int
    kv_cache_dtype: str
    drafts: Drafts | None

    def heads_of(self, query_heads: int) -> int:
        """Query heads of one GPU, if the server splits the model's heads over several."""
        if query_heads % self.tensor_parallel:
            raise fail(
                f"--tensor-parallel is {self.tensor_parallel}; expected a divisor of the "
                f"{query_heads} query heads"
            )
        return query_heads // self.tensor_parallel


def _described(shape: HeadShape, served: _Served) -> DescribedServer:
    import torch

    from deft_backend.hosts.common.described_server import DescribedServer
    from deft_backend.hosts.common.warm_up import LayerKind
    from deft_backend.shapes import EIGHT_BIT_CACHES

    eight_bits, dtype = EIGHT_BIT_CACHES.get(served.kv_cache_dtype), getattr(torch, shape.dtype)
    # SGLang's models hold sinks in bfloat16, vLLM's in the server's dtype.
    sinks = torch.bfloat16 if served.host == "sglang" else dtype
    # A KV head that several GPUs need is on each of them.
    kv_heads = max(1, shape.kv_heads // served.tensor_parallel)
    heads = (served.heads_of(shape.query_heads), kv_heads, shape.head_dim)
    return DescribedServer(
        served.host,
        *(*heads, dtype, served.page_size, served.max_batch),
        kv_dtype=None if eight_bits is None else getattr(torch, eight_bits),
        drafts=served.drafts,
        layers=(LayerKind(shape.soft_cap, sinks if shape.sinks else None),),
    )


def _drafts(host: str, tokens: int | None, trees: bool) -> Drafts | None:
    """What the server verifies; refuses arguments that the host does not accept."""
    from deft_backend.hosts.common.described_server import drafts_of
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
    return drafts_of(host, tokens, trees=trees)


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
    folder: Path,
    out: Path | None,
    described: DescribedServer | DescribedLatentServer,
    target: str | None,
    threads: int | None,
    settings: Settings,
) -> None:
    from triton import knobs

    from deft_backend.attention import AttentionError
    from deft_backend.compile.kernel_folder import KernelFolderError, Origin, check_fillable, fill
    from deft_backend.compile.variants import compile_all, compiling_for
    from deft_backend.policies import PolicyError

    gpu, console = _gpu(target), Console()
    try:
        check_fillable(folder)
    except KernelFolderError as error:
        raise fail(f"cannot fill {folder}: {error}; use --out with another folder") from None
    with reported(AttentionError, PolicyError):
        variants = described.variants(gpu, settings)
    say(console, f"{len(variants)} kernels for {gpu.name}: {described}")
    # A cache of its own: what the folder gets does not depend on what this machine has compiled.
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope(), compiling_for(gpu.arch):
        knobs.cache.dir = cache
        done = compile_all(variants, threads=threads)
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


def described_latent(
    latent: LatentHeads, settings: Settings, served: _Served
) -> DescribedLatentServer:
    left = TESTED[served.host].leaves_mla(settings)
    if left is not None:
        raise fail(f"{left}; set what the server has here, too")
    if settings.policy != AUTO:
        raise fail(f"DEFT_POLICY is {settings.policy}, and MLA takes plans of auto alone; unset it")
    if latent.sparse:
        raise fail("the model's latent attention (MLA) is sparse, which is not supported")
    if (latent.value_dim, latent.rope_dim) != (VALUE_DIM, ROPE_DIM):
        raise fail(
            f"the model has MLA of rank {latent.value_dim} + {latent.rope_dim}; expected "
            f"{VALUE_DIM} + {ROPE_DIM}: a server leaves others to the host"
        )
    if served.kv_cache_dtype != "auto":
        raise fail(
            f"--kv-cache-dtype is {served.kv_cache_dtype}, and MLA reads caches in the model's "
            "dtype alone; leave it out"
        )
    drafts = served.drafts
    if drafts is not None and drafts.trees:
        raise fail("--draft-trees is given, but servers verify MLA's chains alone; leave it out")
    heads = served.heads_of(latent.query_heads)
    import torch

    from deft_backend.hosts.common.described_server import DescribedLatentServer

    sizes = (served.page_size, served.max_batch, 1 if drafts is None else drafts.query_tokens)
    return DescribedLatentServer(served.host, heads, getattr(torch, latent.dtype), *sizes)
