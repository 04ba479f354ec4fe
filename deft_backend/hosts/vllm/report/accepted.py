"""How many draft tokens the host has accepted, from the scheduler's messages to its workers."""

from typing import Any

from deft_backend.telemetry.counters import DraftCounts


class AcceptedDrafts:
    """Counts verified drafts and their accepted tokens, whichever kernel verified them.

    The scheduler's message for a step, in CPU memory, says how many tokens of each request are
    computed. After a verification this number lacks the rejected draft tokens. The last draft of a
    request has no later message and stays uncounted.

    - `late`: steps whose result is unknown when the scheduler sends the next message: 1 with
      asynchronous scheduling, else 0.
    """

    def __init__(self, late: int) -> None:
        self._late = late
        # By request: tokens computed if the target accepts all drafts; then the draft tokens of
        # each step whose result is unknown, oldest first.
        self._open: dict[str, list[int]] = {}
        self._accepted = 0
        self._counts = DraftCounts(0, 0)  # one object, because another thread reads it

    def observe(self, message: Any) -> None:
        """Observer of the scheduler's messages (``SchedulerOutput``)."""
        for request in message.finished_req_ids:
            self._open.pop(request, None)
        cached = message.scheduled_cached_reqs
        scheduled, drafted = message.num_scheduled_tokens, message.scheduled_spec_decode_tokens
        drafts, resumed = self._counts.drafts, cached.resumed_req_ids
        # Every step pays for this loop, so it looks up as little as it can.
        every, late, accepted = self._open, self._late, self._accepted
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            held = every.get(request)
            if held is None or (resumed and request in resumed):
                held = every[request] = [0]
            else:
                known = held.pop(1) if len(held) > late + 1 else 0
                drafts += known > 0
                accepted += known - (held[0] - computed)
            held[0] = computed + scheduled[request]
            held.append(len(drafted[request]) if request in drafted else 0)
        self._accepted = accepted
        # The scheduler may tell a rejection early: counts must not fall.
        self._counts = DraftCounts(drafts, max(self._counts.accepted, self._accepted))

    def read(self) -> DraftCounts:
        """Counts since construction, for any thread."""
        return self._counts
