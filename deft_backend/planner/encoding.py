"""How the fields of a :class:`~deft_backend.planner.plan.Plan` encode what they mean.

Both planners write these values and the kernels read them; nothing else defines them.
"""

from __future__ import annotations

ITEM_ORDER = (1, 0, 2)
"""Tile shapes in the order in which their items lie in a plan: large tile, small tile, masked tile.
Everything else waits for the large tiles, so their kernel must know where the first of their items
lies without reading `tile_ptr`."""

READ_AHEAD = 1024
"""Least number of items that a plan's arrays on the device have room for: a kernel reads the first
items of its programs before it knows how many items there are."""

DIRECT = -1
"""`entry_slot` of an item that is its query's whole attention: it writes the output itself."""

MERGES = -2
"""`entry_slot` of an item that merges its query's other partial results is ``MERGES - slot``, where
`slot` is the first of those results."""

OPEN_END = -1
"""`segment_end` of a range that ends where its request's sequence currently ends."""

SPAN_SHIFT = 16
"""`segment_span` is ``attend_begin | attend_end << SPAN_SHIFT``."""

SPAN_MASK = (1 << SPAN_SHIFT) - 1
"""``segment_span & SPAN_MASK`` is `attend_begin`."""
