"""The smallest host: a page-table engine whose decode attention goes through ``TreeAttention``.

``docs/writing-a-host.md`` walks through it; ``tree_attention.py`` is the adapter, the rest is what
any engine has.
"""
