"""The rule ``filling``: as many chunks as leave no program idle.

More would add partial results but no parallelism (Flash-Decoding; FastTree: long-context
splitting).
"""

import numpy as np

from deft_backend.compile.host_jit import host_jit
from deft_backend.policies.edges import Int64Array


@host_jit
def fills(
    tokens: Int64Array, tiles: Int64Array, parts: Int64Array, chunk: int, programs: int
) -> bool:
    """Whether the programs hold all chunks at once.

    Each chunk of a range that is cut takes a program. Ranges of one chunk share programs. So a
    context much longer than the rest (long tail) is cut even if the rest fills the GPU.
    """
    chunks = np.int64(0)
    shared = np.int64(0)
    for r in range(len(tokens)):
        if tokens[r] > chunk:
            chunks += tiles[r] * parts[r]
        else:
            shared += tiles[r] * tokens[r]
    return bool(chunks * chunk + shared <= programs * chunk)
