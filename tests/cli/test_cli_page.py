"""The page about the commands is what they say about themselves."""

from tools.cli_page import PAGE, page


def test_the_page_is_up_to_date_and_short():
    """After a change of a command: ``python -m tools.cli_page``."""
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text
    assert len(text.split()) <= 1500
