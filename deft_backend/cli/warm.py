"""`deft warm`: compile a server's kernels before it starts, on any machine: it needs no GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deft_backend.cli.errors import fail, reported
from deft_backend.cli.models import RevisionOption
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.cli.shapes import HeadDimOption, HeadShape, ShapeModelOption, chosen_shape
from deft_backend.config import Settings, SettingsError
from deft_backend.folders import create_private, kernels_directory

if TYPE_CHECKING:
    from deft_backend.kernels import Gpu

_PAGE_SIZES = {"sglang": 1, "vllm": 16}
"""Each host's page size on a GPU, unless its arguments say otherwise."""


def warm(
    model: ShapeModelOption = None,
    revision: RevisionOption = None,
    heads: Annotated[
        str | None, typer.Option(help="Query heads/KV heads of the model; default: 32/8.")
    ] = None,
    head_dim: HeadDimOption = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp16 or bf16; default: the model's, or bf16.")
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="GPUs over which the server splits the heads.")
    ] = 1,
    host: HostOption = None,
    page_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens a page; default: 1 (SGLang), 16 (vLLM).")
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Most requests that decode at once.")
    ] = 2048,
    target: Annotated[
        str | None, typer.Option(help="GPU to compile for, such as sm_90; default: this machine's.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that compile; default: one for each CPU.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to fill; default: DEFT_KERNEL_CACHE, or `kernels` in the cache."),
    ] = None,
) -> None:
    """Compile a server's kernels into a folder, from which it takes them when it starts.

    A GPU is needed only if --target names none.
    """
    with reported(SettingsError):
        settings = Settings.from_env()
        folder = out or kernels_directory(settings)
    shape = chosen_shape(model, revision, heads, head_dim, dtype, default_dtype="bf16")
    if dtype is None and shape.dtype == "float32":  # hosts serve such checkpoints in 16 bits
        raise fail("the model's dtype is float32; pass --dtype with the server's, fp16 or bf16")
    shape = _on_one_gpu(shape, tensor_parallel)
    host = chosen_host(host, needed=False)
    if host == "sglang" and page_size not in (None, 1):
        raise fail(f"--page-size is {page_size}; SGLang's adapter works with pages of 1 token")
    server = (host, page_size or _PAGE_SIZES[host], max_batch)
    _fill(folder, out, shape, server, target, threads, settings)


def _on_one_gpu(shape: HeadShape, tensor_parallel: int) -> HeadShape:
    """The heads of one GPU, if the server splits the model's heads over several."""
    if shape.query_heads % tensor_parallel:
        raise fail(
            f"--tensor-parallel is {tensor_parallel}; expected a divisor of the "
            f"{shape.query_heads} query heads"
        )
    # A KV head that several GPUs need is on each of them.
    kv_heads = max(1, shape.kv_heads // tensor_parallel)
    return shape._replace(query_heads=shape.query_heads // tensor_parallel, kv_heads=kv_heads)


def _gpu(target: str | None) -> Gpu:
    import torch

    from deft_backend.kernels import Gpu

    if target is not None:
        try:
            return Gpu.named(target)
        except ValueError as error:
            raise fail(f"--target is {error}") from None
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise fail(
            "this machine has no GPU to compile for; pass --target with the server's, such as "
            "sm_90 for H100 and H200"
        )
    return Gpu.at(torch.device("cuda", torch.cuda.current_device()))


def _fill(
    folder: Path, out: Path | None, shape: HeadShape, server: tuple[str, int, int],
    target: str | None, threads: int | None, settings: Settings,
) -> None:  # fmt: skip
    """Compile for a server (host, page size, largest batch) and write the folder."""
    import torch
    from triton import knobs

    from deft_backend.attention import AttentionError
    from deft_backend.compile.described_gpu import compiling_for
    from deft_backend.compile.kernel_folder import KernelFolderError, Origin, check_fillable, fill
    from deft_backend.compile.variants import compile_all
    from deft_backend.hosts.common.described_server import DescribedServer
    from deft_backend.policies import PolicyError

    gpu = _gpu(target)
    host, page_size, max_batch = server
    described = DescribedServer(
        host, *shape[:3], getattr(torch, shape.dtype), page_size, max_batch
    )  # fmt: skip
    try:
        check_fillable(folder)
    except KernelFolderError as error:
        raise fail(f"cannot fill {folder}: {error}; use --out with another folder") from None
    with reported(AttentionError, PolicyError):
        variants = described.variants(gpu, settings)
    console = Console()
    console.print(
        f"{len(variants)} kernels for {gpu.name}: heads {shape.query_heads}/{shape.kv_heads} of "
        f"{shape.head_dim}, {shape.dtype}, pages of {page_size} on {host}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
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
    console.print(f"{done}", highlight=False, soft_wrap=True)
    console.print(f"{folder} holds {held} kernels", highlight=False, soft_wrap=True)
