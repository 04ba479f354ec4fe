"""Reports a server's counters: in its state file, its log and its ``/metrics``."""

import logging

from deft_backend.files.folders import state_directory
from deft_backend.settings.config import LOG_LEVELS, Settings
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.metrics import publisher, rank_labels
from deft_backend.telemetry.state import ServerState, StateWriter

logger = logging.getLogger("deft_backend")


def start(
    state: ServerState,
    settings: Settings,
    *,
    pp_rank: int | None,
    dp_rank: int | None,
    log: DecodeLog | None,
    publishes: bool,
) -> None:
    """Report the counters of a server process from now on, in a background thread.

    A failure here must never stop the server: it costs one line in the log.

    - `pp_rank`, `dp_rank`: ranks of this process, if the server has several, for its file's name.
    - `log`: logs as often as the host; None in processes that do not log for the server.
    - `publishes`: whether the host makes its ``/metrics`` from values that its processes publish.
    """
    try:
        ranks = {"pp": pp_rank, "dp": dp_rank}
        suffix = "".join(f"-{kind}{rank}" for kind, rank in ranks.items() if rank is not None)
        writer = StateWriter(state, state_directory(settings), suffix)
        publish = publisher(rank_labels(writer.path)) if publishes else None
        if publish is not None:
            writer.listeners.append(publish)
        if log is not None and LOG_LEVELS[settings.log] <= logging.INFO:
            writer.listeners.append(log)
        writer.start()
    except Exception as error:
        logger.warning(
            "deft: the server's counters cannot be reported (%r). Decoding goes on; `deft top` and "
            "/metrics do not show it", error,
        )  # fmt: skip
        logger.debug("deft: reporting failed", exc_info=True)
