"""The package's version, for modules below the package itself.

A build writes `_version.py` with the version of the newest tag. A checkout that was never installed
has no such file.
"""

try:
    from deft_backend._version import version as VERSION
except ImportError:
    VERSION = "0.2.0.dev0"

__all__ = ["VERSION"]
