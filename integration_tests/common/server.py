"""A running server of either host, from its clients' side."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import openai

from deft_backend.settings.policy_names import AUTO, POLICY_NAMES
from deft_backend.tools.servers.process import ServerProcess, get_page
from integration_tests.common.plugins import HOST_CALLS, QUICK_INTERPRETER, ROOT, plugin_settings

MODEL = Path(os.environ.get("INTEGRATION_MODEL", ROOT / "models" / "tiny-llama"))
"""The served model; the environment may name another one."""

DRAFT = ROOT / "models" / "tiny-draft"
"""The draft model of models/tiny-llama."""

START_SECONDS = 400
REQUEST_SECONDS = 400

# Healthy hosts never log these lines.
TROUBLE = re.compile(
    r"Traceback|\bERROR\b"
    r"|deft: .*(fail|not agree|dropped|could not|not supported|not registered|does not show)"
)

# The tests are small, so small batches and short prefixes must also go through the kernels.
EAGER = {"DEFT_MIN_BATCH": "1"}

POLICY_GROUPS = tuple(f"policy-{name}" for name in POLICY_NAMES if name != AUTO)
"""Groups of servers with a policy other than the default."""


def cores_of_two_ranks():
    """One CPU core for each of two tensor-parallel ranks, in both hosts' variables."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[-1]}"


@dataclass(frozen=True)
class Group:
    """Flags and settings of a server that serves several tests."""

    flags: str = ""
    """As on a command line."""
    settings: dict[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    """Targets of entry points."""
    model: Path = MODEL
    cpu_speculation: bool = False
    """SGLang: speculate on the CPU, with stand-ins for what the host's wheel lacks."""
    cli: bool = False
    """SGLang: start it with ``sglang serve``, not ``python -m sglang.launch_server``."""
    lora: bool = False
    """vLLM: serve an adapter beside the model."""


@dataclass(frozen=True)
class Ask:
    """One completion of exactly the requested length, or a chat: greedy, or sampled with a seed."""

    prompt: str
    tokens: int = 8
    n: int = 1
    logprobs: int = 1
    """0: none. SGLang mixes no prefill into the steps of requests that ask for them."""
    sampled: bool = False
    model: str = "tiny"
    pattern: str | None = None
    """vLLM: pattern that the answer must match, by guided decoding."""
    beams: int = 0
    """vLLM: number of beams of a beam search."""
    also: tuple[str, ...] = ()
    """Further prompts of the same request; each gets its own choice."""
    system: str | None = None
    """Of a chat, in which `prompt` is the user's message; its answer may end earlier."""
    stream: bool = False

    @property
    def choices(self):
        return (self.beams or self.n) * (1 + len(self.also))

    def body(self):
        """The request in the form of the `openai` client.

        vLLM refuses several choices at temperature 0. The likeliest token alone, sampled, is the
        same answer.
        """
        several = self.n > 1
        extra = {"ignore_eos": True}
        if self.pattern is not None:
            extra = {"structured_outputs": {"regex": self.pattern}}
        body = {
            "model": self.model,
            "stream": self.stream,
            "max_tokens": self.tokens,
            "n": self.beams or self.n,
            "temperature": 1.6 if self.sampled else 1 if several else 0,
        }
        if self.sampled:
            body["seed"] = 7
        elif several:
            extra["top_k"] = 1
        if self.system is not None:
            del extra["ignore_eos"]
            messages = [("system", self.system), ("user", self.prompt)]
            body["messages"] = [{"role": role, "content": text} for role, text in messages]
            return {**body, "logprobs": True, "top_logprobs": 1, "extra_body": extra}
        body["prompt"] = [self.prompt, *self.also] if self.also else self.prompt
        if self.beams:
            extra["use_beam_search"] = True
        elif self.logprobs:
            body["logprobs"] = self.logprobs
        return {**body, "extra_body": extra}


def together(asks):
    """Several greedy completions in one request, so that they decode together. On few cores,
    separate requests may arrive so late that each decodes alone.
    """
    return replace(asks[0], also=tuple(ask.prompt for ask in asks[1:]))


@dataclass
class Answer:
    """A choice, as far as it has come: its text and, for each token, the likeliest tokens."""

    text: str = ""
    finish: str | None = None
    token_texts: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[dict[str, float]] = field(default_factory=list)

    def add(self, part, chat):
        self.finish = part.finish_reason or self.finish
        logs = part.logprobs
        if chat:
            message = part.delta if hasattr(part, "delta") else part.message
            self.text += message.content or ""
            for entry in (logs.content or ()) if logs else ():
                self.token_texts.append(entry.token)
                self.logprobs.append(entry.logprob)
                self.likeliest.append({each.token: each.logprob for each in entry.top_logprobs})
        else:
            self.text += part.text
            if logs:
                self.token_texts += logs.tokens or ()
                self.logprobs += logs.token_logprobs or ()
                self.likeliest += logs.top_logprobs or ()


class Server:
    group = ""  # of :data:`integration_tests.hosts.GROUPS`

    def __init__(self, process, state_dir):
        self.process = process
        self._state_dir = state_dir

    @property
    def log(self):
        return self.process.log.read_text(errors="replace")

    @property
    def loses_logprobs(self):
        """Whether lists of log-probabilities may lack a token of the text.

        This happens in SGLang 0.5.17, also with its own backend. Its switch for tests retracts a
        request right after the prefill and loses the entry of the prefill's token.
        """
        return "SGLANG_TEST_RETRACT" in self.process.command.environment

    def trouble(self):
        """Log lines that a healthy server never writes."""
        return [line for line in self.log.splitlines() if TROUBLE.search(line)]

    def state(self, rank="tp0"):
        """The settled state file of one of the server's ranks."""
        time.sleep(0.8)  # three rounds of the writer
        return json.loads(_state_path(self._state_dir, self.process.command, rank).read_text())

    def is_left_alone(self):
        """Whether nothing of ours shows in a server that does not ask for us.

        No state file, no line in the log, and no series in ``/metrics``, if it has that page.
        """
        page = get_page(f"{self.process.url}/metrics") or ""
        lines = [line for line in self.log.splitlines() if "deft:" in line]
        return not (self._state_dir.exists() or lines or "deft_" in page)

    def traits(self):
        """What anybody sees of the server: the names in ``/metrics``, and the lines of its log.

        Numbers, paths and times of the lines are left out.
        """
        names = {(name, *sorted(key for key, _ in labels)) for name, labels in self.metrics("")}
        lines = (_VOLATILE.sub("#", line) for line in self.log.splitlines())
        return names, {line for line in lines if not _POLLED.search(line)}

    def deft(self, *arguments):
        """What `deft` prints next to this server."""
        command = [sys.executable, "-m", "deft_backend", *arguments]
        settings = {"DEFT_CACHE_DIR": str(self._state_dir.parent), "COLUMNS": "80"}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **settings},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def metrics(self, prefix):
        """Values in ``/metrics`` by name and labels, of names that begin with `prefix`."""
        from prometheus_client.parser import text_string_to_metric_families

        with self.open("metrics") as response:
            families = text_string_to_metric_families(response.read().decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if sample.name.startswith(prefix)
        }

    def client(self):
        return openai.AsyncOpenAI(
            base_url=f"{self.process.url}/v1",
            api_key="none",
            timeout=REQUEST_SECONDS,
            max_retries=0,
        )

    def complete(self, asks):
        """Send all requests at once; returns the answers in order, each a list of choices."""
        return asyncio.run(self._complete(asks))

    async def _complete(self, asks):
        async with self.client() as client:
            return list(await asyncio.gather(*(complete(client, ask) for ask in asks)))

    def post(self, path, body):
        """The answer of one of the host's own endpoints."""
        with self.open(path, json.dumps(body).encode()) as response:
            return json.loads(response.read())

    def open(self, path, data=None):
        """The response of an endpoint: to a GET, or to a POST of `data`."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(
            f"{self.process.url}/{path}", data, {"Content-Type": "application/json"}
        )
        return opener.open(request, timeout=30 if data is None else REQUEST_SECONDS)


def ask_to(server, path, body=None):
    """Send a control request; returns the HTTP status."""
    try:
        with server.open(path, json.dumps(body or {}).encode()) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


async def complete(client, ask, *, begun=None, leave_after=None, **changes):
    """Send a request, with `changes` of its fields; returns its choices in order.

    The first piece of the answer sets the event `begun`. The stream is closed after the chunk of
    number `leave_after`, which aborts the request: its answer is what has come so far.
    """
    body = {**ask.body(), **changes}
    chat = "messages" in body
    found = [Answer() for _ in range(ask.choices)]

    def add(response):
        if begun is not None:
            begun.set()
        for part in response.choices:
            found[part.index].add(part, chat)

    create = client.chat.completions.create if chat else client.completions.create
    response = await create(**body)
    if body.get("stream"):
        seen = 0
        async for chunk in response:
            add(chunk)
            seen += 1
            if seen == leave_after:
                await response.close()
                break
    else:
        add(response)
    return found


def _state_path(folder, command, rank):
    """The state file of one of a server's ranks, not its batch; None without one."""
    found = folder.glob(f"{command.port}-{rank}@*.json")
    return next((path for path in found if not path.name.endswith(".batch.json")), None)


_VOLATILE = re.compile(r"/\S*|0x[0-9a-f]+|[0-9a-f]{16,}|-?[0-9][0-9.,:TZ-]*")
_POLLED = re.compile(r"GET|POST|it/s|s/it|throughput")  # depends on how often somebody asks


class Reference:
    """The answers of the host's own backend; each is requested once."""

    def __init__(self, server):
        self._server = server
        self._known = {}

    def answers(self, asks):
        unknown = list(dict.fromkeys(ask for ask in asks if ask not in self._known))
        self._known.update(zip(unknown, self._server.complete(unknown), strict=True))
        return [self._known[ask] for ask in asks]


def state_settings(backend, folder, *plugins):
    """Settings of a server that keeps its state in a folder and verifies every decode.

    Each of its processes calls the functions that `plugins` name. The model is tiny: threads of an
    operation would wait for each other longer than they compute.
    """
    watched = (HOST_CALLS,) if backend == "deft" else ()
    return {
        "OMP_NUM_THREADS": "1",
        "DEFT_CACHE_DIR": str(folder / "cache"),
        "DEFT_VERIFY": "1",
        "DEFT_LOG": "debug",
        **plugin_settings(folder / "plugins", QUICK_INTERPRETER, *watched, *plugins),
    }


@contextmanager
def started(command, folder, kind=Server):
    """A server of this class for a `with` block; a file that the environment names then gets its
    decode steps through tree attention and its device."""
    with ServerProcess(command, folder / "server.log", timeout=START_SECONDS) as process:
        try:
            yield kind(process, folder / "cache" / "servers")
        finally:
            path = _state_path(folder / "cache" / "servers", command, "tp0")
            if path is not None and "INTEGRATION_STEPS" in os.environ:
                state = json.loads(path.read_text())
                with open(os.environ["INTEGRATION_STEPS"], "a") as file:
                    print(json.dumps([state["steps_tree"], state["device"]]), file=file)
