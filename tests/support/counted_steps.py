"""Count steps as an adapter and its planner do."""

import numpy as np

from deft_backend.telemetry.counters import DECODE, Decoded


def host_step(state, reason, tokens, rows=1, kind=DECODE):
    """A step that the host's kernel decodes; `tokens` are those of all contexts."""
    state.count(Decoded(kind, rows, tokens), reason)


def tree_step(state, tokens, loaded, rows=1, kind=DECODE):
    """A step of tree attention with a plan, whose items load `loaded` tokens."""
    memory = vars(state).get("planned")
    if memory is None:
        state.planned = memory = np.zeros(4, np.int64)
        state.on_device.attach(memory)
    memory += [1, tokens, loaded, 0]
    state.count(Decoded(kind, rows, tokens))
