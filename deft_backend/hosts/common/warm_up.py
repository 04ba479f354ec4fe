"""Compile everything before the first request, so that no request waits for a compiler."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deft_backend.attention import Gpu, LatentAttention, TreeAttention
from deft_backend.attention.self_check import (
    Case,
    HostTensors,
    failed_latent_check,
    first_failure,
    unrecorded,
)
from deft_backend.compile.kernel_folder import (
    KernelFolderError,
    Origin,
    SharedCache,
    is_filled,
    take,
)
from deft_backend.compile.variants import Variant, compile_all, recorded
from deft_backend.files.folders import compiled_directory, kernels_directory
from deft_backend.forest.token_tree import words_of
from deft_backend.hosts.common.limits import refuse_if
from deft_backend.planner.on_device import SIZES
from deft_backend.settings.config import Settings

logger = logging.getLogger("deft_backend")

CHECK_SECONDS = 2.0  # of the check of a server's kernels


class Drafts(NamedTuple):
    query_tokens: int  # query tokens of a request
    ragged: bool = False  # whether requests have different numbers of them, up to this one
    trees: bool = False  # whether they form trees, not chains
    always: bool = False  # whether every step verifies drafts; if not, others are plain decode


class LayerKind(NamedTuple):
    """What differs between a server's layers, as far as kernels are compiled for it."""

    soft_cap: bool = False  # whether the scores have a soft cap
    sinks: torch.dtype | None = None  # of the layer's sinks; None for a layer without sinks


@dataclass(frozen=True)
class StepTensors(HostTensors):
    """A host's tensors with what its steps do, as far as kernels are compiled for them."""

    drafts: Drafts | None = None  # what the server verifies; None if it does not speculate
    layers: Sequence[LayerKind] = (LayerKind(),)  # each kind of those through tree attention


def warm_up_attention(
    attention: TreeAttention,
    tensors: StepTensors,
    *,
    smallest: int,
    shared: SharedCache | None = None,
) -> None:
    """Compile the kernels of every launch that a step may need, then run each of them once.
    `smallest` is the smallest batch that tree attention decodes; other ranks fill `shared` at the
    same time. In the interpreter, which compiles nothing, nothing runs.
    """
    device = attention.device
    if attention.interpreted:
        return
    if device.type == "cuda":
        variants = step_variants(attention, tensors, smallest=smallest)
        compile_for_server(variants, device, shared)
    _run_steps(attention, tensors, smallest)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compile_for_server(
    variants: Sequence[Variant], device: torch.device, shared: SharedCache | None
) -> None:
    """Compile kernels side by side for a GPU and load them; the log says how long it took."""
    done = compile_all(
        variants, prepare=lambda: torch.cuda.set_device(device), load=True, shared=shared
    )
    logger.info("deft: %s", done)


def step_variants(
    attention: TreeAttention, tensors: StepTensors, *, smallest: int
) -> list[Variant]:
    with recorded() as variants:
        _run_steps(attention, tensors, smallest)
    return list(variants)


def latent_variants(attention: LatentAttention, integers: torch.dtype) -> list[Variant]:
    with recorded() as variants:
        failed_latent_check(attention)
        table = torch.zeros((1, 1), dtype=torch.int32, device=attention.device)
        for batch in _batches(1, attention.max_batch):
            rows, lens = (table.new_zeros(batch, dtype=integers) for _ in range(2))
            attention.plan_batch(table, lens, table_rows=rows)
    attention.clear_plan()
    return list(variants)


def _batches(least: int, largest: int, blocks: int = 1) -> list[int]:
    """A batch for each size of the device planner's kernels; the slowest to compile comes first."""
    inner = {size // blocks for size in SIZES if least * blocks <= size < largest * blocks}
    return sorted({least, *inner, largest}, reverse=True)


def _run_steps(attention: TreeAttention, tensors: StepTensors, smallest: int) -> None:
    """Run steps on one page that together launch every kernel variant the server may need."""
    device, largest = attention.device, attention.max_batch
    least = min(smallest, largest)
    # Hosts hold the scales of a cache of 8 bits on the device.
    eight_bits = attention.kv_dtype != attention.dtype
    scale: float | torch.Tensor = attention.unit_scale if eight_bits else 1.0

    def run(batch: int, columns: int, drafts: Drafts) -> None:
        tokens, columns = drafts.query_tokens, max(drafts.query_tokens + 1, columns)
        table = torch.zeros((1, columns), dtype=tensors.table_dtype, device=device)
        lens = torch.full((batch,), tokens + 1, dtype=tensors.integers, device=device)
        rows = torch.zeros(batch, dtype=tensors.integers, device=device)
        attention.plan_batch(table, lens, table_rows=rows, query_tokens=tokens)
        step: dict[str, Any] = {"table_rows": rows, "k_scale": scale, "v_scale": scale}
        if drafts.ragged:
            starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
            step["query_start"] = starts * tokens
        if drafts.trees:
            words = (batch, tokens, words_of(tokens))
            step["ancestors"] = torch.zeros(words, dtype=torch.int64, device=device)
        shape = (attention.num_query_heads, attention.head_dim)
        # All query tokens are one in memory: a batch of drafts is large.
        one = torch.zeros((2, 1, *shape), dtype=attention.dtype, device=device)
        q, step["out"] = one.expand(2, batch * tokens, *shape)
        for kind in tensors.layers:
            sinks = None
            if kind.sinks is not None:
                sinks = torch.zeros(attention.num_query_heads, dtype=kind.sinks, device=device)
            caches, cap = (tensors.k_cache, tensors.v_cache), float(kind.soft_cap)
            attention.run(q, *caches, table, lens, logit_cap=cap, sinks=sinks, **step)

    drafts = tensors.drafts
    blocks = attention.capacity.max_batch // largest
    for columns in tensors.table_columns:
        if drafts is not None:
            for batch in _batches(least, largest, blocks):
                run(batch, columns, drafts)
        if drafts is None or not drafts.always:
            for batch in _batches(least, largest):
                run(batch, columns, Drafts(1))


# The kernels' cache


@contextmanager
def ranks_cache(settings: Settings, device: torch.device) -> Iterator[SharedCache | None]:
    """Compile, in the ``with`` block, into the cache that the ranks of a server share.

    It holds the kernels of `deft warm` first. The block gets None on the CPU, and if the folder
    cannot be written: each rank then compiles into its own cache of Triton.
    """
    if device.type != "cuda":
        yield None
        return
    folder = compiled_directory(settings)
    cache = None
    try:
        cache = SharedCache(folder)
    except OSError as error:
        logger.warning(
            "deft: %s cannot be written (%s); each rank compiles all kernels. Name another folder "
            "in DEFT_CACHE_DIR",
            folder,
            error,
        )
    with nullcontext() if cache is None else cache.in_use():
        take_compiled_kernels(settings, device)
        yield cache


def take_compiled_kernels(settings: Settings, device: torch.device) -> None:
    """Copy the kernels of `deft warm` into Triton's cache, or log why they cannot be used."""
    folder = kernels_directory(settings)
    if settings.kernel_cache is None and not is_filled(folder):
        return
    rest = "the server compiles its kernels. Run `deft warm` to fill the folder again"
    try:
        taken = take(folder, Origin.of(Gpu.at(device).name))
    except (KernelFolderError, OSError) as error:
        logger.warning("deft: the kernels in %s are not used: %s; %s", folder, error, rest)
        return
    if taken.damaged:
        logger.warning("deft: %d kernels in %s are damaged; %s", taken.damaged, folder, rest)
    logger.info(
        "deft: %d kernels of %s copied into Triton's cache, which held %d more of them",
        taken.copied,
        folder,
        taken.held,
    )


# The check


def prepare_kernels(attention: TreeAttention, tensors: StepTensors, settings: Settings) -> None:
    """Compile every kernel of a server into the cache of its ranks, run and check each."""
    with ranks_cache(settings, attention.device) as shared:
        warm_up_attention(attention, tensors, smallest=settings.min_batch, shared=shared)
        refuse_if(failed_self_check(attention, tensors))


def failed_self_check(attention: TreeAttention, tensors: StepTensors) -> str | None:
    """Why the kernels must not decode here, or None; after the warm-up, before any capture."""
    gpu = gpu_name(attention.device)
    unknown = None if gpu is None else unrecorded(gpu)
    if unknown is None:
        return None
    began = time.perf_counter()
    failed = first_failure(attention, _cases(tensors), tensors, CHECK_SECONDS)
    if failed is not None:
        return (
            f"{unknown} has no recorded results, and the check of its kernels failed "
            f"({failed.case}: {failed.failure}). Run `deft doctor --check` and report its table"
        )
    logger.info(
        "deft: %s has no recorded results; its kernels passed a check of %.1f s",
        unknown,
        time.perf_counter() - began,
    )
    return None


def gpu_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _cases(tensors: StepTensors) -> list[Case]:
    drafts = tensors.drafts
    steps: list[tuple[int, bool, bool]] = []  # query tokens, and whether trees and ragged
    if drafts is None or not drafts.always:
        steps.append((1, False, False))
    if drafts is not None:
        steps.append((drafts.query_tokens, drafts.trees, drafts.ragged))
    return [Case(True, *step, *kind) for kind in tensors.layers for step in steps]
