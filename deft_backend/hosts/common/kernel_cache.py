"""Compiled kernels that `deft warm` left: a server takes them instead of compiling."""

from __future__ import annotations

import logging

import torch

from deft_backend.attention import Gpu
from deft_backend.compile.kernel_folder import KernelFolderError, Origin, is_filled, take
from deft_backend.files.folders import kernels_directory
from deft_backend.settings.config import Settings

logger = logging.getLogger("deft_backend")

_REST = "the server compiles its kernels. Run `deft warm` to fill the folder again"


def take_compiled_kernels(settings: Settings, device: torch.device) -> None:
    """Copy the kernels of `deft warm` into Triton's cache, or log why they cannot be used.

    Nothing is logged if nobody filled the folder and no setting names it.
    """
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
        "deft: %s: %d kernels copied into Triton's cache, which held %d",
        folder, taken.copied, taken.held,
    )  # fmt: skip
