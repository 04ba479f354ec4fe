"""Put a function around the attention backends that the host makes for a draft model.

Changes: wraps ``DraftBackendFactory.create_decode_backend()`` and
    ``DraftBackendFactory.create_draft_extend_backend()`` (SGLang 0.5.17 to 0.5.23).
Why: the host makes these backends by itself, from a table of its own names. Its registry of
backends serves the draft model's prefill alone. Looks for: both methods, and the attributes
``draft_model_runner`` and ``topk`` of the factory. Harmless to other servers: nothing is wrapped
before an adapter asks, and a function that does not want a backend returns it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deft_patches.wrapping import wrap

Around = Callable[[Any, int, Any], Any]
"""Called with the draft's model runner, the branches of a draft, and the host's backend."""

_around: dict[str, Around] = {}


def install(steps: Around, extension: Around) -> None:
    """Give the backends of the draft's decode steps, and of its other passes, to two functions."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    _around.update(steps=steps, extension=extension)
    wrap(DraftBackendFactory, "create_decode_backend", _steps)
    wrap(DraftBackendFactory, "create_draft_extend_backend", _extension)


def remove() -> None:
    """Leave the host's backends as they are from now on."""
    _around.clear()


def _steps(original: Callable[[Any], Any], factory: Any) -> Any:
    return _surrounded("steps", factory, original(factory))


def _extension(original: Callable[[Any], Any], factory: Any) -> Any:
    return _surrounded("extension", factory, original(factory))


def _surrounded(kind: str, factory: Any, backend: Any) -> Any:
    around = _around.get(kind)
    if around is None or backend is None:  # drafts of one token have no decode steps
        return backend
    return around(factory.draft_model_runner, factory.topk, backend)
