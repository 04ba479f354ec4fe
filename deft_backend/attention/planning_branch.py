"""Planning on a stream of its own, beside what the caller launches before its first attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PlanningBranch:
    """A second stream for launches of a plan, which the caller's stream waits for later.

    While a CUDA graph is captured, the stream becomes a branch of the graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._open = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch on the second stream, after all that the current stream holds so far.

        The CPU has one stream, and launches at once.
        """
        if self._device.type == "cpu":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._open = True  # an error must not leave a branch that the graph's capture cannot end
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for what was launched beside it, if anything was."""
        if self._open and self._stream is not None:
            self._open = False
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
