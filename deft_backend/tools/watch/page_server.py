"""The page of `deft inspect` and its data: read-only, for browsers on this machine."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from deft_backend.forest import PrefixForest
from deft_backend.tools.watch import figures
from deft_backend.tools.watch.engines import Follower, find_engines

State = Callable[[int], Mapping[str, Any]]


class PageServer(ThreadingHTTPServer):
    """An HTTP server on 127.0.0.1 with two documents: ``/`` and ``/state.json``. `state` gives the
    data for the number of an engine. Raises OSError if it cannot listen.
    """

    def __init__(self, port: int, state: State) -> None:
        self.state = state
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves early is no error worth a traceback."""


def is_loopback(header: str | None) -> bool:
    """Whether a request's ``Host`` names this machine's loopback interface.

    A page elsewhere can let its own name lead to this machine (DNS rebinding). The browser then
    sends that name.

    >>> is_loopback("127.0.0.1:8765"), is_loopback("localhost"), is_loopback("evil.example")
    (True, True, False)
    """
    return re.sub(":[0-9]{1,5}$", "", header or "").lower() in ("127.0.0.1", "localhost", "[::1]")


@cache
def page() -> bytes:
    return resources.files("deft_backend.tools.watch").joinpath("page.html").read_bytes()


@cache
def content_policy() -> str:
    """Only the page's own script and style run, and it connects to nobody else."""
    text = page().decode()

    def digests(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        sums = (base64.b64encode(hashlib.sha256(p.encode()).digest()).decode() for p in parts)
        return " ".join(f"'sha256-{value}'" for value in sums)

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 20.0  # closes a connection that sends nothing for so many seconds
    server_version = "deft"
    sys_version = ""

    def log_message(self, format: str, *arguments: Any) -> None:
        """No line for each request: the page asks once a second."""

    def parse_request(self) -> bool:
        """Refuse a foreign ``Host`` before anything else, whatever the method."""
        if not super().parse_request():
            return False
        if is_loopback(self.headers.get("Host")):
            return True
        self._send(
            403,
            b"the Host header names another machine; open the address that "
            b"'deft inspect' printed\n",
        )
        return False

    def do_GET(self) -> None:
        try:
            parts = urlsplit(self.path)
        except ValueError:  # such as "//["
            self._send(400, b"no path\n")
            return
        if parts.path == "/":
            self._send(200, page(), "text/html; charset=utf-8")
        elif parts.path == "/state.json":
            engine = parse_qs(parts.query).get("engine", [""])[0]
            known = re.fullmatch(r"[0-9]{1,9}", engine) is not None
            content = self.server.state(int(engine) if known else 0)
            self._send(200, json.dumps(content).encode(), "application/json")
        else:
            self._send(404, b"not found; there are / and /state.json\n")

    def _send(self, status: int, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": content_policy(),
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Connection": "close",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


_ASK_SECONDS = 2.0  # between two questions for the batch of a server with the device planner

_PREFIXES = 8  # shared prefixes that the page lists


class Inspector:
    """Looks at the server on one port, for any number of threads."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        self._lock = threading.Lock()
        self._followers: dict[Path, Follower] = {}

    def state(self, number: int = 0) -> dict[str, Any]:
        with self._lock:
            present = find_engines(self._folder, self._port)
            names = [each.name for each in present]
            base: dict[str, Any] = {"port": self._port, "engines": names}
            if not present:
                said = "no server has written a state file for this port"
                gone = {"status": "missing", "said": said, "title": "", "problem": said}
                return {**base, **gone, "lines": [], "batch": None}
            engine = present[min(max(number, 0), len(names) - 1)]
            row = self._followers.setdefault(engine.path, Follower(_ASK_SECONDS)).look(engine)
            return {
                **base,
                "status": engine.status,
                "said": figures.status(engine),
                "title": figures.title(engine),
                "problem": row.batch if isinstance(row.batch, str) else "",
                "lines": [] if engine.reading is None else list(figures.lines(row)),
                "batch": None if isinstance(row.batch, str) else batch_json(row.batch),
            }

    def close(self) -> None:
        with self._lock:
            for follower in self._followers.values():
                follower.close()


def batch_json(forest: PrefixForest) -> dict[str, Any]:
    ranges = (forest.start, forest.length, forest.query_begin, forest.query_end)
    return {
        "requests": [
            {"name": f"#{at}", "tokens": tokens}
            for at, tokens in enumerate(forest.seq_lens.tolist())
        ],
        "order": forest.order.tolist(),
        "nodes": np.stack((forest.parent, *ranges), axis=1).tolist() if forest.num_nodes else [],
        "prefixes": [
            {**prefix._asdict(), "saved": prefix.saved}
            for prefix in figures.shared_prefixes(forest)[:_PREFIXES]
        ],
    }
