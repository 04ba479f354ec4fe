"""The values in the arrays of a plan, as both planners write them and the kernels read them."""

ITEM_ORDER = (1, 3, 0, 2)
"""Tile shapes in the order in which their items lie in a plan: large, ordered, small, masked tile.
On Hopper, the launch after the large tiles starts only when each of their programs has looked for
its first item. So items of the large tile come first, and its kernel finds them without `tile_ptr`.
"""

READ_AHEAD = 1024
"""A plan's arrays on the device have room for at least this many items. The reason: a kernel reads
the first items of its programs before it knows the number of items."""

ARRIVALS = 512
"""How many counters of programs a plan's arrays on the device hold
(``hopper/large_tile_memory.py``)."""

DIRECT = -1
"""`entry_slot` of an item that computes its query's whole attention and writes the output
itself."""

MERGES = -2
"""An item that merges its query's other partial results has the `entry_slot` ``MERGES - slot``.
Here `slot` is the first of those results."""

OPEN_END = -1  # `segment_end` of a range that ends where its request's sequence currently ends

SPAN_SHIFT = 16  # `segment_span` is ``attend_begin | attend_end << SPAN_SHIFT``

SPAN_MASK = (1 << SPAN_SHIFT) - 1  # ``segment_span & SPAN_MASK`` is `attend_begin`
