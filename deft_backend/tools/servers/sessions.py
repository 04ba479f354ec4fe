"""End a server with every process of its session.

As a program, it does so when the process that started it dies, however that happens. It then reads
the leader's process id from its standard input, and 0 once the server has been ended. The end of
the input means that nobody else will end the server. It uses the standard library alone.
"""

import contextlib
import os
import signal
import sys
import time

PATIENCE = 10.0  # seconds until a server that was asked to end is killed


def end_session(leader: int) -> None:
    """Ask the leader of a session to end, wait, and kill what is left of the session.

    Only the leader is asked: it ends its workers. If a worker ended first, the server would report
    a crash. An interrupted wait must leave no process behind either.
    """
    try:
        if _leads(leader):
            os.kill(leader, signal.SIGTERM)
        end = time.monotonic() + PATIENCE
        while _fields(leader)[:1] not in ([], ["Z"]) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        for pid in _members(leader):
            # Once more: another process may have this id by now.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(pid) == leader:
                    os.kill(pid, signal.SIGKILL)


def _leads(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(pid) == pid
    return False


def _fields(pid: str | int) -> list[str]:
    """What ``/proc`` tells about a process behind its name: state, parent, group, session, …"""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii", "replace").split()
    except OSError:
        return []


def _members(leader: int) -> list[int]:
    pids = [name for name in os.listdir("/proc") if name.isdecimal()]
    return [int(pid) for pid in pids if _fields(pid)[3:4] == [str(leader)]]


def main() -> None:
    leader = 0
    for line in sys.stdin:
        leader = int(line)
    if leader and _leads(leader):
        end_session(leader)


if __name__ == "__main__":
    main()
