"""A KV cache in which all that no request may read is NaN, infinite, or as large as can be."""

from __future__ import annotations

import math

import torch

from benchmarks.fuzz.attention_settings import LAYOUT_AXES, AttentionSetting

POISON = (math.nan, math.inf, -math.inf)
POISON_BYTES = (0x7F, 0xFF, 0x7C)
"""For 8 bits: NaN and infinity. The kernels take them as finite numbers, which are the largest."""


class PoisonedCache:
    """Keys and values of every page, and a second cache that holds those of one batch alone.

    - `setting`: it decides how the memory of the second cache is laid out.

    - `clean, filled`: [2, pages, page_size, Hkv, D]. Keys and values: all of them, and those that
      :meth:`fill` has put in place.
    """

    def __init__(self, setting: AttentionSetting, pages: int, device: torch.device) -> None:
        heads, dim, size = setting.kv_heads, setting.head_dim, setting.page_size
        dtype: torch.dtype = getattr(torch, setting.kv_dtype or setting.dtype)
        random = torch.Generator(device).manual_seed(heads * dim + size)
        shape = (2, pages, size, heads, dim)
        self.clean = torch.randn(shape, generator=random, device=device).to(dtype)
        length = dict(zip(LAYOUT_AXES, shape, strict=True))
        memory = torch.empty([length[axis] for axis in setting.layout], dtype=dtype, device=device)
        self.filled = memory.permute([setting.layout.index(axis) for axis in LAYOUT_AXES])
        self._device = device
        self._poison: tuple[float, ...] = POISON
        self._from, self._to = self.clean, self.filled
        if setting.eight_bits:
            self._poison = POISON_BYTES
            self._from, self._to = (one.view(torch.uint8) for one in (self.clean, self.filled))

    def fill(
        self, table: torch.Tensor, contents: torch.Tensor, lens: torch.Tensor, poison: int
    ) -> None:
        """Put each token that a request may read in its place, and poison everything else.

        - `table, contents`: [B, P] int. Pages of each request, and the clean pages that hold the
          same tokens.
        - `lens`: [B] int
        - `poison`: which poison, by any number.
        """
        self._to.fill_(self._poison[poison % len(self._poison)])
        size = self.clean.shape[2]
        position = torch.arange(table.shape[1] * size, device=self._device)
        request, used = (position < lens[:, None]).nonzero(as_tuple=True)
        page, place = used // size, used % size
        source = self._from[:, contents[request, page].long(), place]
        self._to[:, table[request, page].long(), place] = source
