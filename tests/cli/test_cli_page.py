"""The page about the commands is what they say about themselves."""

import inspect
from pathlib import Path
from typing import get_type_hints

from deft_backend.cli.app import app
from drawings import check_drawn
from tools.cli_page import PAGE, page


def test_the_page_is_up_to_date_and_short():
    """After a change of a command: ``python -m tools.cli_page``."""
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text
    assert len(text.split()) <= 1500


def options():
    """Every parameter of every command: type, names, limits and default."""
    for command in (*app.registered_commands, app.registered_callback):
        function = command.callback
        yield f"# {function.__name__}"
        hints = get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            said = hints[name].__metadata__[0]
            limits = f"{said.min} to {said.max}, eager: {said.is_eager}"
            words = (name, *(said.param_decls or ()), said.metavar or "", hints[name].__origin__)
            yield f"{' '.join(map(str, words))}: {limits} = {parameter.default!r}"


def test_options_have_the_limits_and_defaults_as_drawn():
    check_drawn("\n".join(options()) + "\n", Path(__file__).with_name("options.txt"))
