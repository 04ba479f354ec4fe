"""A headless Chromium for tests of pages, driven through WebDriver by the standard library."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
MISSING = "no Chromium with chromedriver is installed (Debian: apt-get install chromium-driver)"

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1360,1000"),
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"right": "\ue014", "left": "\ue012", "up": "\ue013", "down": "\ue015", "escape": "\ue00c"}


class Browser:
    def __init__(self, base):
        self._base = base

    def open(self, url):
        self._call("POST", "url", {"url": url})

    def run(self, script, *arguments):
        """The value that a JavaScript function body returns."""
        return self._call("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def click(self, selector):
        """A real click, which fails if another element covers this one."""
        found = self._call("POST", "element", {"using": "css selector", "value": selector})
        self._call("POST", f"element/{found[_ELEMENT]}/click", {})

    def press(self, *keys):
        presses = [
            {"type": kind, "value": KEYS.get(key, key)}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        source = {"type": "key", "id": "keys", "actions": presses}
        self._call("POST", "actions", {"actions": [source]})

    def until(self, met, seconds=20.0):
        end = time.monotonic() + seconds
        while not (value := met()):
            assert time.monotonic() < end, self.text("body")
            time.sleep(0.1)
        return value

    def scheme(self, name):
        features = [{"name": "prefers-color-scheme", "value": name}]
        asked = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._call("POST", "goog/cdp/execute", asked)

    def messages(self):
        """What the browser logged since the last time: errors of scripts, refused resources."""
        found = self._call("POST", "se/log", {"type": "browser"})
        return [entry["message"] for entry in found]

    def _call(self, method, path, body=None):
        return _call(method, f"{self._base}/{path}", body)


@contextmanager
def browser(folder):
    """A browser with a fresh profile under `folder`, for a `with` block."""
    assert DRIVER is not None
    log = folder / "chromedriver.log"
    driver = subprocess.Popen(
        [DRIVER, "--port=0", f"--log-path={folder / 'driver.log'}"],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        base = f"http://127.0.0.1:{_port(driver, log)}"
        options = {"args": [*_FLAGS, f"--user-data-dir={folder / 'profile'}"], "binary": CHROMIUM}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = _call("POST", f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})
        base = f"{base}/session/{session['sessionId']}"
        try:
            yield Browser(base)
        finally:
            _call("DELETE", base)
    finally:
        driver.terminate()
        driver.wait(timeout=20)


def _port(driver, log):
    end = time.monotonic() + 30
    while (
        match := re.search(r"started successfully on port (\d+)", said := log.read_text())
    ) is None:
        assert driver.poll() is None, said
        assert time.monotonic() < end, said
        time.sleep(0.1)
    return int(match[1])


def _call(method, url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {url}: {error.read().decode()[:500]}") from None
