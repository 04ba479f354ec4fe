"""A server's counters, and the JSON file that shows them to other processes."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deft_backend.compile.clock import COMPILING
from deft_backend.files.folders import state_directory
from deft_backend.files.private_files import write_private
from deft_backend.settings.config import LOG_LEVELS, Settings
from deft_backend.telemetry.counters import (
    SCHEMA,
    Content,
    Counters,
    Decoded,
    DeviceCounters,
    Place,
    ServerDescription,
    StateName,
    Steps,
    process_runs,
)
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.metrics import publisher
from deft_backend.telemetry.shown_batch import Batch, answer, answer_file, request_file

logger = logging.getLogger("deft_backend")

INTERVAL = 0.25  # seconds between two looks of the writer

RETRY_SECONDS = 60.0  # until the writer tries again, if it could not write: a disk may be mended

KEPT_SECONDS = 7 * 86400.0  # a file without a sign of life for this long is deleted


@dataclass
class ServerState(ServerDescription):
    """Counters of one process, without a lock: the forward thread adds, the writer reads."""

    on_device: DeviceCounters = field(default_factory=DeviceCounters)  # of the planner
    # Layers that follow the plans; None: all. The others read query by query.
    device_tree_layers: int | None = None
    # The last batch that the device planned, for ``deft explain``; or why there is none to show.
    batch: Batch | str | None = None
    values_apart: bool = True  # whether the cache holds values besides keys; not with MLA
    serving: bool = True  # whether the host has ended its start, whose steps do not count
    _steps: dict[Content, Steps] = field(default_factory=dict, init=False)
    _verified: int = field(default=0, init=False)
    _before: Counters = field(default_factory=Counters, init=False)  # of the host's start

    @property
    def token_bytes(self) -> int:
        return (1 + self.values_apart) * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def count(self, decoded: Decoded, reason: str | None = None) -> None:
        """Count a step; `reason`: why the host's kernel decoded it; None: tree attention did."""
        self._add(Content(decoded.kind, reason), decoded, 1)

    def count_failure(self, decoded: Decoded, reason: str) -> None:
        self._add(Content(decoded.kind, None), decoded, -1)
        self._add(Content(decoded.kind, reason), decoded, 1)

    def _add(self, content: Content, decoded: Decoded, sign: int) -> None:
        step = Steps(1, decoded.rows, decoded.tokens * self.num_layers * self.token_bytes)
        self._steps[content] = self._steps.get(content, Steps()).plus(step, sign)
        if content.reason is None:
            self._verified += sign * decoded.verified

    def begin_serving(self) -> None:
        """Count from now on; all steps of the host's start must have ended."""
        self._before = replace(self._since_start(), compile_seconds=0.0)
        self.serving = True

    def counters(self) -> Counters:
        if not self.serving:
            return Counters(compile_seconds=COMPILING.seconds)
        return self._since_start() - self._before

    def _since_start(self) -> Counters:
        by_content = dict(self._steps)  # one copy, because another thread adds
        plans, attended, loaded, spent = self.on_device.read()
        layers = self.num_layers if self.device_tree_layers is None else self.device_tree_layers
        by_host = sum(of.kv_bytes for content, of in by_content.items() if content.reason)
        loaded_by_all = loaded * layers + attended * (self.num_layers - layers)
        return Counters(
            {content: steps for content, steps in by_content.items() if steps.steps},
            plans=plans,
            kv_bytes_read=by_host + loaded_by_all * self.token_bytes,
            kv_bytes_query_guided=by_host + attended * self.num_layers * self.token_bytes,
            plan_seconds=spent * 1e-9,
            verified_tokens=self._verified,
            compile_seconds=COMPILING.seconds,
        )

    def as_json(self, counters: Counters) -> dict[str, Any]:
        return {"schema": SCHEMA, **self.description(), **counters.as_json()}


class StateWriter:
    """Writes a :class:`ServerState` to its file, from a daemon thread and at exit. If the file
    cannot be written, the log says so once, and the writer tries again later. Listeners, added
    before :meth:`start`, get the counters on the writer's thread; one that raises is dropped.
    """

    def __init__(
        self,
        state: ServerState,
        directory: Path,
        pp_rank: int | None = None,
        dp_rank: int | None = None,
    ) -> None:
        self.state = state
        self.name = StateName(state.port, state.rank, pp_rank, dp_rank, Place.here(), state.pid)
        self.path = directory / self.name.file_name
        self.listeners: list[Callable[[Counters], None]] = []
        self._seen: Counters | None = None
        self._lock = threading.Lock()
        self._failed_at: float | None = None

    def start(self) -> None:
        self._remove_old()
        self.look()
        threading.Thread(target=self._run, name="deft-state", daemon=True).start()
        atexit.register(self.look)

    def look(self) -> None:
        """Write the file, or touch it as a sign of life, and call the listeners."""
        with self._lock:  # between this thread and the exit; the forward thread never takes it
            counters = self.state.counters()
            self._write(counters)
            self._show_batch()
            for listener in list(self.listeners):
                try:
                    listener(counters)
                except Exception as error:
                    self.listeners.remove(listener)
                    logger.warning(
                        "deft: showing the counters in the log or in /metrics failed (%r) and "
                        "ends. Decoding goes on",
                        error,
                    )
                    logger.debug("deft: reporting failed", exc_info=True)

    def _remove_old(self) -> None:
        """Delete this port and rank's files of ended processes, and all without a sign of life."""
        now = time.time()
        with suppress(OSError):
            for entry in os.listdir(self.path.parent):
                name = StateName.parse(entry)
                path = self.path.parent / entry
                if name is None or name == self.name:
                    continue
                with suppress(OSError):
                    same = name._replace(pid=self.name.pid) == self.name
                    old = now - path.lstat().st_mtime > KEPT_SECONDS
                    if old or (same and not process_runs(name.pid)):
                        for file in (path, request_file(path), answer_file(path)):
                            file.unlink(missing_ok=True)

    def _write(self, counters: Counters) -> None:
        if self._waits:
            return
        try:
            if counters == self._seen and self._touched():
                return
            content = {**self.state.as_json(counters), "updated": time.time()}
            write_private(self.path, json.dumps(content))
        except OSError as error:
            if self._failed_at is None:
                logger.warning(
                    "deft: cannot write the server's state file: %s; the server goes on without it "
                    "and tries again every %.0f s",
                    error,
                    RETRY_SECONDS,
                )
            self._failed_at = time.monotonic()
            return
        if self._failed_at is not None:
            logger.warning("deft: the server's state file can be written again")
            self._failed_at = None
        self._seen = counters

    @property
    def _waits(self) -> bool:
        failed = self._failed_at
        return failed is not None and time.monotonic() - failed < RETRY_SECONDS

    def _touched(self) -> bool:
        """Move the file's time as a sign of life; False without a file."""
        try:
            os.utime(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _show_batch(self) -> None:
        asked = request_file(self.path)
        try:
            if self._waits or not asked.is_file():  # a folder that cannot be written
                return
            asked.unlink()  # remove it first, so that a failure is not repeated forever
            write_private(answer_file(self.path), json.dumps(answer(self.state.batch)))
        except OSError as error:
            logger.warning(
                "deft: cannot write the last batch for `deft explain`: %s. Decoding goes on", error
            )

    def _run(self) -> None:
        while True:
            time.sleep(INTERVAL)
            self.look()


def report_counters(
    state: ServerState,
    settings: Settings,
    *,
    pp_rank: int | None,
    dp_rank: int | None,
    log: DecodeLog | None,
    publishes: bool,
) -> None:
    """Report a server process's counters from now on, in a background thread; never raises."""
    try:
        writer = StateWriter(state, state_directory(settings), pp_rank, dp_rank)
        publish = publisher(writer.name.labels) if publishes else None
        if publish is not None:
            writer.listeners.append(publish)
        if log is not None and LOG_LEVELS[settings.log] <= logging.INFO:
            writer.listeners.append(log)
        writer.start()
    except Exception as error:
        logger.warning(
            "deft: the server's counters cannot be reported (%r). Decoding goes on; `deft top` and "
            "/metrics do not show it",
            error,
        )
        logger.debug("deft: reporting failed", exc_info=True)
