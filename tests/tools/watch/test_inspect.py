"""`deft inspect`: what the page's server answers, and the page in a real browser."""

import http.client
import json
import re
import socket
import threading

import pytest

from browser import CHROMIUM, DRIVER, MISSING, browser
from counted_steps import tree_step
from deft_backend.forest import build_forest
from deft_backend.telemetry.counters import Place
from deft_backend.telemetry.state import StateWriter
from deft_backend.tools.watch.page_server import Inspector, PageServer, page
from sglang_fakes import make_state
from state_files import batch_of, state_path


class Served:
    def __init__(self, folder):
        self.state = make_state()
        self.state.policy, self.state.short_tokens = "invariant", 2048
        self.writer = StateWriter(self.state, folder)
        self.decode(["a", "b", "c", "d"])
        self.writer.start()  # signs of life, however slow the machine is
        self.page = PageServer(0, Inspector(folder, 1).state)
        threading.Thread(target=self.page.serve_forever, args=(0.05,), daemon=True).start()

    def decode(self, names):
        """The first half shares 640 tokens, all share 512; each has 20 of its own."""
        half = len(names) // 2
        shared = [640 if at < half else 512 for at in range(1, len(names))]
        lens = [660 if at < half else 532 for at in range(len(names))]
        forest = build_forest(range(len(names)), shared, lens)
        self.state.batch = batch_of(forest)
        tree_step(self.state, forest.tokens_attended, forest.tokens_stored)
        self.writer.look()

    def get(self, path, method="GET", **headers):
        port = self.page.server_address[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request(method, path, headers=headers)
        return connection.getresponse()


@pytest.fixture
def served(tmp_path):
    found = Served(tmp_path / "servers")
    yield found
    found.page.shutdown()
    found.page.server_close()


def test_the_data(served, tmp_path):
    answer = served.get("/state.json")
    assert answer.headers["Content-Type"] == "application/json"
    content = json.loads(answer.read())
    while content["batch"] is None:  # the server has not answered yet
        content = json.loads(served.get("/state.json").read())
    batch = content["batch"]
    assert content["status"] in ("decoding", "idle")  # on a slow machine
    assert content["engines"] == ["1"]
    assert [request["name"] for request in batch["requests"]] == ["#0", "#1", "#2", "#3"]
    assert (
        content["title"]
        == "SGLang 0 · deft, policy invariant, short chunks up to 2048 tokens · cpu"
    )
    assert batch["nodes"][0] == [-1, 0, 512, 0, 4]
    first = {"node": 0, "start": 0, "tokens": 512, "readers": 4, "saved": 3 * 512}
    assert batch["prefixes"][0] == first
    other = {**json.loads(served.writer.path.read_text()), "policy": "auto"}
    place = Place("another-node", 7)
    state_path(tmp_path / "servers", place=place).write_text(json.dumps(other))
    answers = [served.get(f"/state.json?engine={number}").read() for number in (0, 1, 7)]
    assert [b"policy auto" in answer for answer in answers] == [False, True, True]
    served.decode(["a", "b"])
    while len(json.loads(served.get("/state.json").read())["batch"]["requests"]) != 2:
        pass


def test_only_two_documents_and_only_reading(served):
    assert served.get("/").status == 200
    for path in ("/x", "/../etc/passwd", "/state.json/", "/%2e%2e/state.json"):
        assert served.get(path).status == 404, path
    for method in ("HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "ODD"):
        assert served.get("/state.json", method).status == 501, method
    for engine in ("-1&x=%00", 20 * "9", "7"):
        assert served.get(f"/state.json?engine={engine}").status == 200
    for line, status in (
        (b"GET http://[ HTTP/1.1", b"400"),
        (b"GET " + b"/" * 70_000 + b" HTTP/1.1", b"414"),
        (b"nonsense", b"400"),
    ):
        with socket.create_connection(served.page.server_address[:2], timeout=20) as client:
            client.sendall(line + b"\r\nHost: localhost\r\n\r\n")
            assert status in client.makefile("rb").read()[:500]


def test_names_that_lead_here_from_elsewhere_are_refused(served):
    """DNS rebinding: the browser sends the attacker's name."""
    port = served.page.server_address[1]
    for host in (f"127.0.0.1:{port}", "localhost", "LOCALHOST:9", "[::1]:80"):
        assert served.get("/state.json", Host=host).status == 200, host
    names = ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost:x")
    for host in (*names, "192.0.2.1", "127.1.2.3", "localhost.", "", "a b", "[::1"):
        answer = served.get("/state.json", Host=host)
        assert answer.status == 403, host
        assert b"batch" not in answer.read()
        assert served.get("/state.json", "DELETE", Host=host).status == 403, host


def test_the_page_loads_nothing(served):
    answer = served.get("/")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    text = page().decode()
    assert not re.findall(r"(?:src|href)=\"(?!data:,)", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"innerHTML|document\.write|\beval\b", text)
    assert len(page()) < 40_000


@pytest.fixture
def tab(tmp_path):
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(MISSING)
    with browser(tmp_path) as found:
        yield found


def test_the_page_in_a_browser(served, tab):
    """A block is drawn, chosen by mouse and by keys, and followed while the forest changes."""
    tab.open(served.page.url)

    def blocks():
        script = """return [...document.querySelectorAll('rect.node')].map(r => ({
            width: +r.getAttribute('width'), height: +r.getAttribute('height'),
            label: r.getAttribute('aria-label'), fill: r.getAttribute('fill')}))"""
        return tab.run(script)

    tab.until(lambda: len(blocks()) == 6)
    drawn = {block["label"]: block for block in blocks()}
    whole = drawn["512 tokens shared by 4 requests, positions 0 to 512"]
    half = drawn["128 tokens shared by 2 requests, positions 512 to 640"]
    alone = drawn["20 tokens of request #2 alone, positions 512 to 532"]
    assert whole["width"] == pytest.approx(4 * half["width"], rel=0.01)
    assert whole["height"] == pytest.approx(2 * half["height"], rel=0.01)
    assert len({whole["fill"], half["fill"], alone["fill"]}) == 3
    assert tab.text("#status").split()[0] in ("decoding", "idle")  # on a slow machine
    assert "4 requests" in tab.text("#lines")

    tab.click("rect[data-node='0']")
    assert "512 tokens, shared by 4 requests" in tab.text("#detail")
    assert "#0 · 660" in tab.text("#detail")
    assert "saves 1,536 tokens in every layer" in tab.text("#detail")
    tab.press("right")
    assert "128 tokens, shared by 2 requests" in tab.text("#detail")
    tab.press("down")
    assert "20 tokens of one request" in tab.text("#detail")
    assert tab.run("return document.activeElement.getAttribute('aria-selected')") == "true"
    tab.press("z")
    assert len(blocks()) == 1
    tab.press("escape", "up")
    assert "128 tokens" in tab.text("#detail")

    # Requests join and end: the chosen block stays, and the focus with it.
    served.decode(["x", "a", "b", "y", "z", "d"])
    tab.until(lambda: "6 requests" in tab.text("#lines"))
    assert "128 tokens, shared by 3 requests" in tab.text("#detail")
    assert "#2 · 660" in tab.text("#detail")
    tab.press("left")
    assert "512 tokens, shared by 6 requests" in tab.text("#detail")
    served.decode(["p", "q"])
    tab.until(lambda: "2 requests" in tab.text("#lines"))
    assert "512 tokens, shared by 2 requests" in tab.text("#detail")

    light = tab.run("return getComputedStyle(document.body).backgroundColor")
    tab.scheme("dark")
    assert tab.run("return getComputedStyle(document.body).backgroundColor") != light
    served.decode([f"r{n}" for n in range(500)])  # many nodes
    tab.until(lambda: len(blocks()) == 502)
    served.page.shutdown()
    served.page.server_close()
    assert not [line for line in tab.messages() if "Content Security Policy" in line]
    tab.until(lambda: "has lost" in tab.text("#status"))
