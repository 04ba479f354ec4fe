"""A workload from a trace of arrivals: prompts are made so that equal hash ids share text."""

from collections.abc import Sequence
from functools import lru_cache, partial

from deft_backend.tools.ab.workloads import TRACE
from deft_backend.tools.harness.workload import Request, Workload, poisson
from deft_backend.tools.traces.arrivals import Arrival, shared_tokens
from deft_backend.tools.traces.invented_text import passage


def trace_workload(
    arrivals: Sequence[Arrival],
    *,
    name: str,
    characters_a_token: float,
    speed: float = 1.0,
    rate: float | None = None,
    seed: int = 0,
) -> Workload:
    """The requests of a trace, at the times of the trace.

    - `arrivals`: Sorted by time.
    - `name`: the file's name, for the report.
    - `characters_a_token`: converts tokens to characters of the invented text.
    - `speed`: above 0; divides the trace's times, so 2 replays it twice as fast.
    - `rate`: Poisson arrivals of this rate, in place of the trace's times.
    - `seed`: of the text and of the Poisson arrivals. Another seed finds nothing in a server's
      cache.

    Raises WorkloadError if the rate is impossible.
    """

    @lru_cache(maxsize=20_000)
    def block(id: int | str, characters: int) -> str:
        head = f"{id}.{seed}: "  # blocks differ from their first token on
        return (head + passage(characters, f"{seed} {id}"))[:characters]

    def prompt(number: int, arrival: Arrival) -> str:
        """Made when it is sent: all prompts together would not fit into memory."""
        characters = round(arrival.block_tokens * characters_a_token)
        blocks = [block(id, characters) for id in arrival.hash_ids]
        if len(blocks) * arrival.block_tokens < arrival.input_length:  # a rest without an id
            blocks.append(block(f"r{number}", characters))
        return "".join(blocks)[: max(1, round(arrival.input_length * characters_a_token))]

    origin = arrivals[0].timestamp
    times = [(arrival.timestamp - origin) / 1e3 / speed for arrival in arrivals]
    said = f"the trace's times, {speed:g} × as fast" if speed != 1 else "the trace's times"
    if rate is not None:
        times, said = poisson(len(arrivals), rate, seed)
    prompts = sum(arrival.input_length for arrival in arrivals)
    return Workload(
        TRACE,
        f"{len(arrivals):,} requests of {name}: {prompts:,} prompt tokens, "
        f"{shared_tokens(arrivals) / prompts:.0%} of them shared with an earlier request",
        (),
        tuple(
            Request(
                f"request {at}", partial(prompt, at, arrival), arrival.output_length, at=due,
                prompt_tokens=arrival.input_length,
            )
            for at, (due, arrival) in enumerate(zip(times, arrivals, strict=True))
        ),
        said,
    )  # fmt: skip
