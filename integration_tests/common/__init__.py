"""The shared parts of both hosts' integration tests."""

import pytest

# Let asserts in these modules explain their failures like those of a test.
pytest.register_assert_rewrite(
    *(f"{__name__}.{part}" for part in ("answers", "control", "counted"))
)
