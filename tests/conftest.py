"""Settings for every test: no downloads, and one profile for hypothesis."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("deft", deadline=None, print_blob=True)
settings.load_profile("deft")
