"""Changes to host internals that no public API allows: one file each, loaded by the adapters.

Each file says what it changes, for which versions and why. ``install(...)`` applies the patch;
``remove(...)`` takes back what it did for one model runner. The host's contract
(``deft_backend/hosts/sglang/versions.py``) names every member that a patch needs, so an adapter
installs none in a host that lacks one. ``wrapping.py`` and ``graph_runner.py`` serve all patches.
"""
