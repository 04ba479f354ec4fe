"""What reaches an adapter's entry points, in order: so tests compare a fake host with a real one.

In a real server, which calls :func:`install` as a plugin, and in a test, each call becomes a row:
the entry point before it, its own name, and its arguments by type, dtype and dimensions.
"""

import functools
import inspect
import json
import os
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

ENTRIES = {
    "sglang": ("backend:DeftAttentionBackend.init_forward_metadata forward",),
    "vllm": (
        "cached_prefixes:CachedPrefixes.observe",
        "builder:TreeBuilder.__init__ build",
        "backend:TreeImplementation.forward",
    ),
}
PROPERTY = "property"  # of a kind that nobody asks for here
MOST = 500
"""Calls that a server's process notes."""


def install():
    """Append this process's distinct calls to a file next to the server's cache folder."""
    host = "sglang" if find_spec("sglang") else "vllm"
    path, told = path_of(os.environ["DEFT_CACHE_DIR"]), set()

    def tell(row):
        line = json.dumps(row)
        if line not in told:
            told.add(line)
            with path.open("a") as file:
                print(line, file=file)

    _wrap(host, tell, setattr)


def path_of(cache_folder):
    return Path(cache_folder).parent / "host_calls.jsonl"


def calls_of(cache_folder):
    """The rows of a server with this cache folder."""
    return [json.loads(line) for line in path_of(cache_folder).read_text().splitlines()]


@contextmanager
def noted_calls(host):
    """A list that gets the rows of all calls in this process, during a `with` block."""
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        _wrap(host, rows.append, patch.setattr)
        yield rows


def unlike(fake, real):
    """How each call of a fake differs from the most similar one of the host; empty if none does."""
    found = []
    for before, name, arguments in fake:
        each = [
            _differences(arguments, others, name)
            for other_before, other_name, others in real
            if name == other_name and before in (None, other_before)
        ]
        found += min(each, key=len, default=[f"no call of {name} after {before}"])
    return sorted(set(found))


def _wrap(host, tell, replace):
    last, count = None, 0

    def wrapped(name, function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def noting(*args, **kwargs):
            nonlocal last, count
            count += 1
            if count <= MOST:
                given = signature.bind(*args, **kwargs).arguments
                given.pop("self")
                tell([last, name, {key: _described(value, 3) for key, value in given.items()}])
                last = name
            return function(*args, **kwargs)

        return noting

    for entry in ENTRIES[host]:
        place, _, names = entry.partition(".")
        module, _, kind = place.partition(":")
        owner = getattr(import_module(f"deft_backend.hosts.{host}.{module}"), kind)
        for name in names.split():
            replace(owner, name, wrapped(f"{kind}.{name}", getattr(owner, name)))


def _described(value, depth):
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{value.dtype}, {value.ndim} dimensions".removeprefix("torch.")
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__
    if isinstance(value, list | tuple | set | dict):
        first = next(iter(value.values() if isinstance(value, dict) else value), None)
        return {"kind": type(value).__name__, "first": _described(first, depth - 1)}
    if depth == 0 or callable(value) or not hasattr(value, "__dict__"):
        return "object"
    computed = {
        name: PROPERTY
        for kind in type(value).__mro__
        for name, part in vars(kind).items()
        if isinstance(part, property | functools.cached_property)
    }
    return computed | {name: _described(part, depth - 1) for name, part in vars(value).items()}


def _differences(fake, real, path):
    """Where they differ. A fake may lack what a host gives, and says nothing by None."""
    if isinstance(fake, dict) and isinstance(real, dict):
        return [
            line
            for name, part in fake.items()
            for line in _differences(part, real.get(name, "missing"), f"{path}.{name}")
        ]
    silent = fake in ("NoneType", "object") or isinstance(fake, dict) or real == PROPERTY
    return [] if silent or fake == real else [f"{path}: {fake}, and the host's: {real}"]
