"""What the integration tests of both hosts share."""

import pytest

# Asserts there say as much when they fail as those of a test.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in ("ab", "answers", "counted")))
