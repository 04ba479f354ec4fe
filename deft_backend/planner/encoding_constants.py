"""The values of ``planner/encoding.py`` as constants of Triton; kernels read their `value`."""

import triton.language as tl

from deft_backend.planner import encoding

ARRIVALS = tl.constexpr(encoding.ARRIVALS)
DIRECT = tl.constexpr(encoding.DIRECT)
MERGES = tl.constexpr(encoding.MERGES)
OPEN_END = tl.constexpr(encoding.OPEN_END)
SPAN_SHIFT = tl.constexpr(encoding.SPAN_SHIFT)
SPAN_MASK = tl.constexpr(encoding.SPAN_MASK)
