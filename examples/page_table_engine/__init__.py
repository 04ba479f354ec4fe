"""A minimal host: a page-table engine that decodes through ``TreeAttention``.

``docs/writing-a-host.md`` walks through it. ``adapter.py`` is the adapter; every engine has
the other parts.
"""
