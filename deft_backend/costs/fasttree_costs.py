"""Padding in FastTree's cost equations, as the fit of its coefficients counts it."""


def pad(tile: int, size: int) -> int:
    """``Pad(TS, N) = TS - ((N - 1) % TS + 1)``: padding elements of the last tile."""
    return tile - ((size - 1) % tile + 1)


def query_padding_cost(tile_queries: int, num_queries: int, length: int, head_dim: int) -> int:
    """``C_{P,q}(nQ, len) = Pad(TS_q, nQ) · len · d``."""
    return pad(tile_queries, num_queries) * length * head_dim


def context_padding_cost(tile_tokens: int, num_queries: int, length: int, head_dim: int) -> int:
    """``C_{P,c}(nQ, len) = nQ · Pad(TS_c, min(len, TS_c)) · d``."""
    return num_queries * pad(tile_tokens, min(length, tile_tokens)) * head_dim
