"""A minimal host: a page-table engine that decodes through ``TreeAttention``.

``docs/writing-a-host.md`` walks through it. ``tree_attention.py`` is the adapter; every engine has
the other parts.
"""
