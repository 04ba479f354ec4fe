"""Where a server's kernels come from: its ranks' common cache, and what `deft warm` left."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deft_backend.attention import Gpu
from deft_backend.compile.kernel_folder import (
    KernelFolderError,
    Origin,
    SharedCache,
    is_filled,
    take,
)
from deft_backend.files.folders import compiled_directory, kernels_directory
from deft_backend.settings.config import Settings

logger = logging.getLogger("deft_backend")

_REST = "the server compiles its kernels. Run `deft warm` to fill the folder again"


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
    try:
        cache = SharedCache(folder)
    except OSError as error:
        logger.warning(
            "deft: %s cannot be written (%s); each rank compiles all kernels. Name another folder "
            "in DEFT_CACHE_DIR",
            folder,
            error,
        )
        take_compiled_kernels(settings, device)
        yield None
        return
    with cache.in_use():
        take_compiled_kernels(settings, device)
        yield cache


def take_compiled_kernels(settings: Settings, device: torch.device) -> None:
    """Copy the kernels of `deft warm` into Triton's cache, or log why they cannot be used."""
    folder = kernels_directory(settings)
    if device.type != "cuda":
        return
    try:
        if settings.kernel_cache is None and not is_filled(folder):
            return
        taken = take(folder, Origin.of(Gpu.at(device).name))
    except KernelFolderError as error:
        logger.warning("deft: the kernels in %s are not used: %s; %s", folder, error, _REST)
        return
    except OSError as error:
        logger.warning("deft: the kernels in %s cannot be copied (%s); %s", folder, error, _REST)
        return
    if taken.damaged:
        logger.warning("deft: %d kernels in %s are damaged; %s", taken.damaged, folder, _REST)
    logger.info(
        "deft: %d kernels of %s copied into Triton's cache, which held %d more of them",
        taken.copied,
        folder,
        taken.held,
    )
