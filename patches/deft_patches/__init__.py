"""Changes to host internals that no public API allows: one file each, loaded by the adapters.

Each file states what it changes, for which versions and why. ``install(...)`` applies the patch.
The function that it returns, or ``remove(...)``, undoes it for one model runner or observer. The
contract (``contract.py`` in each host's folder of ``deft_backend/hosts``) names every member that a
patch needs. An adapter installs no patch in a host that lacks such a member. ``wrapping.py`` serves
all patches.
"""
