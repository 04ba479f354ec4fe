"""Tests with real servers of the installed host; shared parts in ``common`` and ``hosts``."""
