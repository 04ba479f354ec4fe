"""Traces of arrivals in Mooncake's format: requests about documents behind one system prompt."""

import json

BLOCK = 512


def arrival_lines(requests, *, documents=2, blocks=2, own=60, answer=6, gap_ms=25.0):
    """One line a request.

    Request ``i`` asks about document ``i % documents``: one block that all requests share, `blocks`
    of the document, and ``own * (1 + i % 3)`` tokens of its own.
    """
    lines = []
    for i in range(requests):
        document = 1 + i % documents
        ids = [0, *(100 * document + block for block in range(blocks))]
        tokens = own * (1 + i % 3)
        ids += [10_000 + 100 * i + block for block in range(-(-tokens // BLOCK))]
        content = {
            "timestamp": round(gap_ms * i),
            "input_length": (1 + blocks) * BLOCK + tokens,
            "output_length": answer + i % 2,
            "hash_ids": ids,
        }
        lines.append(json.dumps(content))
    return lines
