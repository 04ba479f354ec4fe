"""Changes to host internals that no public API allows: one file each, loaded by the adapters.

Each file says what it changes, for which versions and why, and has two functions: ``missing()``
looks for what the patch needs and says in one line what is not there, or None; ``install(...)``
applies it, ``remove(...)`` takes back what it did for a model runner. Nothing is installed whose
``missing()`` found something. ``wrapping.py`` and ``graph_runner.py`` are what they share.
"""
