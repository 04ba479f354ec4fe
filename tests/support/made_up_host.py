"""The source of a small host package, for tests of the contract."""

from __future__ import annotations

import sys
from textwrap import dedent

FILES = {
    "madeup/__init__.py": """
        from madeup.engine.runner import Runner as EngineRunner

        LAZY = {"LLM": None}

        def __getattr__(name):
            try:
                return LAZY[name]
            except KeyError:
                raise AttributeError(name)
    """,
    "madeup/kinds.py": """
        import enum
        from dataclasses import dataclass
        from typing import NamedTuple


        class Mode(enum.IntEnum):
            DECODE = 1
            EXTEND = enum.auto()


        @dataclass
        class Batch:
            ids: list[int]
            lengths: "Tensor" = None

            @property
            def size(self):
                return len(self.ids)


        class Pair(NamedTuple):
            left: int
            right: int = 0
    """,
    "madeup/engine/__init__.py": "",
    "madeup/engine/base.py": """
        class Base:
            first: int

            def __init__(self, config, *, device="cuda"):
                self.config, self.device = config, device

            def forward(self, query, batch, **kwargs):
                self.last = query

            @classmethod
            def make(cls, config):
                cls.made = True

            build = make
    """,
    "madeup/engine/runner.py": """
        from . import base
        from .base import Base as _Base
        from ..kinds import Batch, Mode as RunMode

        DEFAULT_SIZE: int = 4
        NOTHING = None


        class Runner(_Base):
            limit = 0

            def __init__(self, config, pool_size=DEFAULT_SIZE, **extra):
                super().__init__(config)
                if extra:
                    self.pool: dict = {}

                    def later():
                        self.late = True

            def step(self, batch, overlap=False):
                return batch


        class Native(int):
            pass


        def launch(runner, /, port, *, host="localhost"):
            pass
    """,
    "madeup/native.py": "import madeup_extension_of_a_gpu",
    "madeup/broken.py": "raise OSError('no GPU')",
}


def write_host(folder, changes=None):
    """Write the package into a folder; `changes` holds, by file, a text and its replacement."""
    for name, text in contents(changes).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def forget_host():
    """Let the next import read the package anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "madeup"]:
        del sys.modules[name]


def contents(changes=None):
    """The text of each file, changed."""
    found = {name: dedent(text) for name, text in FILES.items()}
    for name, (piece, instead) in (changes or {}).items():
        assert found[name].count(piece) == 1, f"{piece!r} is not once in {name}"
        found[name] = found[name].replace(piece, instead)
    return found
