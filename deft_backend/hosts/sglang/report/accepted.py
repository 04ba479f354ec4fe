"""How many draft tokens the host has accepted, from its own counts of each request."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from deft_backend.telemetry.counters import DraftCounts


class _Reading(NamedTuple):
    """The requests of a verification, and what was counted before it."""

    requests: Sequence[Any]
    before: DraftCounts  # of earlier batches, minus what these requests had when their batch began


class AcceptedDrafts:
    """Counts verified drafts and their accepted tokens, whichever kernel verified them.

    The host counts on the CPU, after it has received the results of a verification, so nobody waits
    for the device. Counts are added up when requests join or leave, and at each reading.

    - `runner`: the host's model runner that verifies.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        # One object, because another thread reads it.
        self._last = _Reading((), DraftCounts(0, 0))

    def observe(self, forward_batch: Any, batch: Any, runner: Any) -> None:
        """Observer of ``ForwardBatch.init_new``."""
        if runner is not self._runner or not forward_batch.forward_mode.is_target_verify():
            return
        # Requests that leave are counted to their end: the host has all results of a request
        # before it takes the request out of the batch.
        if self._last.requests != batch.reqs:
            counted = self.read()
            requests = list(batch.reqs)  # the host changes its list
            had = _counts(requests)
            before = DraftCounts(counted.drafts - had.drafts, counted.accepted - had.accepted)
            self._last = _Reading(requests, before)

    def read(self) -> DraftCounts:
        """Counts since construction, for any thread."""
        requests, before = self._last
        has = _counts(requests)
        return DraftCounts(before.drafts + has.drafts, before.accepted + has.accepted)


def _counts(requests: Sequence[Any]) -> DraftCounts:
    return DraftCounts(
        sum(request.spec_verify_ct for request in requests),
        sum(request.spec_num_correct_drafts for request in requests),
    )
