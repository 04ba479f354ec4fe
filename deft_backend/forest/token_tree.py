"""Token trees of speculative decoding: from links between draft tokens to ancestor bits."""

import torch

WORD = 64  # ancestors are bits in words of this many


def words_of(tokens: int) -> int:
    """Words that hold a bit for each of `tokens` tokens."""
    return -(-tokens // WORD)


def ancestors_of_links(first_child: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    """[B, n, words] int64: bit ``k`` of word ``w`` is set if a token attends to token ``64 * w +
    k``, an ancestor or itself.

    `first_child`, `next_sibling` [B, n] int64 are indices of tokens within their request, -1 for
    none; token 0 is the root. A token's links backwards lead to the sibling before it or, from a
    first child, to its parent. The parents on this path are the ancestors. Each round doubles the
    length of the path that every token knows, so the device needs no loop over depths.

    >>> child = torch.tensor([[1, -1, 3, -1]])
    >>> sibling = torch.tensor([[-1, 2, -1, -1]])
    >>> [f"{bits:04b}" for bits in ancestors_of_links(child, sibling)[0, :, 0].tolist()]
    ['0001', '0011', '0101', '1101']
    """
    batch, tokens = first_child.shape
    device = first_child.device
    ids = torch.arange(tokens, device=device)
    words = torch.arange(words_of(tokens), device=device)
    own = torch.ones_like(ids) << (ids % WORD)
    one = torch.where(ids[:, None] // WORD == words, own[:, None], 0)  # [n, W]: each token's bit
    # A spare column takes what links of -1 write.
    before = torch.zeros((batch, tokens + 1), dtype=torch.int64, device=device)
    bits = torch.zeros((batch, tokens + 1, one.shape[1]), dtype=torch.int64, device=device)
    children = torch.where(first_child < 0, tokens, first_child)
    siblings = torch.where(next_sibling < 0, tokens, next_sibling)
    before.scatter_(1, children, ids.expand(batch, tokens))
    before.scatter_(1, siblings, ids.expand(batch, tokens))
    bits.scatter_(1, children.unsqueeze(-1).expand(-1, -1, one.shape[1]), one.expand(batch, -1, -1))
    before, bits = before[:, :tokens], bits[:, :tokens]
    length = 1
    while length < tokens:
        bits = bits | bits.gather(1, before.unsqueeze(-1).expand_as(bits))
        before = before.gather(1, before)
        length *= 2
    return bits | one
