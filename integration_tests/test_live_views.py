"""`deft top` and `deft inspect` beside one server that decodes."""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest

from deft_backend.tools.servers.command import HOST_NAMES
from integration_tests.common.answers import PREFIX, TOPICS, on
from integration_tests.common.plugins import ROOT
from integration_tests.common.server import Ask
from integration_tests.hosts import HOST

pytestmark = pytest.mark.rare

DEFT = (sys.executable, "-m", "deft_backend")


def environment(server):
    folder = server.process.command.environment["DEFT_CACHE_DIR"]
    return {**os.environ, "DEFT_CACHE_DIR": folder, "COLUMNS": "80"}


def deft(server, *arguments):
    done = subprocess.run(
        [*DEFT, *arguments],
        capture_output=True,
        text=True,
        env=environment(server),
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def decoding(server):
    """Six requests that share a prefix, in the background; gives whether they still decode."""
    asks = [Ask(PREFIX + f"Tell of {topic}:", tokens=40) for topic in TOPICS]
    traffic = threading.Thread(target=server.complete, args=(asks,))
    traffic.start()
    yield traffic.is_alive
    traffic.join()


def until(found, goes_on):
    while goes_on():
        value = found()
        if value:
            return value
        time.sleep(0.1)
    return found()


@on("default")
def test_top_and_inspect_show_the_batch_that_decodes(server):
    """Both show six requests and the prefix that they share, and no word of it."""
    port = server.process.command.port
    # Six requests that arrive at once may each compute a prefix that the cache does not hold.
    server.complete([Ask(PREFIX, tokens=2)])
    server.state()  # waits until the first step is in the state file
    page = subprocess.Popen(
        [*DEFT, "inspect", "--server", str(port), "--port", "0"],
        text=True,
        stdout=subprocess.PIPE,
        env=environment(server),
        cwd=ROOT,
    )
    try:
        assert page.stdout is not None
        said = page.stdout.readline()  # the server has a state file from its start on
        url = re.search(r"http://127\.0\.0\.1:\d+/", said)
        assert url is not None, said

        def state():
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"{url[0]}state.json", timeout=60) as answer:
                content = json.loads(answer.read())
                return content

        def whole():
            found = state()
            batch = found["batch"]
            return found if batch and len(batch["requests"]) == len(TOPICS) else None

        with decoding(server) as goes_on:
            found = until(whole, goes_on)
            panel = deft(server, "top", "--once")
            read = dict(state()["lines"])["KV read"]  # the first reading may hold one step alone
    finally:
        page.terminate()
        page.wait(20)
    assert found is not None
    batch = found["batch"]
    shared = [node for node in batch["nodes"] if node[4] - node[3] == len(TOPICS)]
    # Other requests may have split the prefix: all six read each part.
    assert sum(node[2] for node in shared) > len(PREFIX) // 2
    assert found["status"] in ("decoding", "idle")  # on a slow machine
    assert found["title"].startswith(f"{HOST_NAMES[HOST]} ")
    assert re.search(r"[1-9]\d? % saved", "".join(text for text, _ in read))
    assert f"{port} decoding" in panel or f"{port} idle" in panel
    assert max(map(len, panel.splitlines())) <= 80
    assert "library" not in json.dumps(found) + panel
    assert not server.trouble()
