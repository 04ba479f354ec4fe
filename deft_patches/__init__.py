"""Changes to host internals that no public API allows: one file each, loaded by the adapters.

Each file states what it changes, for which versions and why. ``install(...)`` applies the patch;
``remove(...)`` undoes it for one model runner. The host's contract
(``deft_backend/hosts/sglang/contract.py``) names every member that a patch needs. An adapter
installs no patch in a host that lacks such a member. ``wrapping.py`` and ``graph_runner.py`` serve
all patches.
"""
