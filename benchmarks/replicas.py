"""KV read by one server, and by several replicas behind a router, over the same requests.

A router that sends requests of one prefix to one replica keeps them in one batch, where tree
attention reads the prefix once. A router that takes turns splits them.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deft_backend.telemetry.counters import Counters
from deft_backend.telemetry.state_reader import settled_counters, state_file
from deft_backend.tools.servers.command import free_port, server_command
from deft_backend.tools.servers.driver_stub import num_gpus
from deft_backend.tools.servers.process import ServerProcess

ONE_SERVER = "one server"


@dataclass(frozen=True)
class Trace:
    """Requests of several prefixes in random order, at most `together` at a time."""

    prefixes: int = 8
    branches: int = 6
    characters: int = 1200
    tokens: int = 12
    together: int = 16

    def prompts(self) -> list[str]:
        """Every branch of every prefix, in words that made-up tokenizers know too (``w12``)."""
        chance = random.Random(0)
        prompts = []
        for _ in range(self.prefixes):
            words = " ".join(f"w{chance.randrange(1000)}" for _ in range(self.characters // 4))
            prompts += [f"{words[: self.characters]} w{branch}" for branch in range(self.branches)]
        chance.shuffle(prompts)
        return prompts


@contextmanager
def replicas(
    host: str, count: int, model: str, folder: Path, logs: Path, options: Sequence[str] = ()
) -> Iterator[list[ServerProcess]]:
    """`count` servers of one model; each has a GPU of its own, and its state file in `folder`."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(number) for number in range(num_gpus())]
    with ExitStack() as running:
        servers = []
        for number in range(count):
            variables = {"DEFT_STATE_DIR": str(folder)}
            if len(gpus) >= count:
                variables["CUDA_VISIBLE_DEVICES"] = gpus[number]
            command = server_command(
                model, free_port(), host=host, environment=variables, host_arguments=options
            )
            log = logs / f"{host}-{number}.log"
            servers.append(running.enter_context(ServerProcess(command, log)))
        yield servers


@contextmanager
def router(program: str, policy: str, urls: Sequence[str], log: Path) -> Iterator[str]:
    """A router in front of servers; yields its address once it answers for them.

    Raises
    ------
    RuntimeError
        If it ends or does not answer within two minutes.
    """
    port, metrics = free_port(), free_port()
    command = [
        program, *(["launch"] if "sglang" in program else []),
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics),
        "--policy", policy, "--worker-startup-check-interval", "1",
        # A busy CPU answers late; a router that gives up its servers would wait for good.
        "--health-check-timeout-secs", "120", "--health-failure-threshold", "20",
        "--worker-urls", *urls,
    ]  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(_wait(url, process, log))
        yield url
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    import aiohttp

    end = time.monotonic() + 120
    # A router may hold a request until a server answers; ask again instead of waiting for good.
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while time.monotonic() < end and process.poll() is None:
            try:
                async with session.get(f"{url}/v1/models") as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, asyncio.TimeoutError):
                pass
            await asyncio.sleep(0.5)
    raise RuntimeError(f"the router does not answer; its log is {log}: {log.read_text()[-2000:]}")


async def send(url: str, model: str, trace: Trace) -> None:
    """Send a trace's requests to a server or router; every answer must have all its tokens."""
    import aiohttp

    free = asyncio.Semaphore(trace.together)

    async def ask(session: aiohttp.ClientSession, prompt: str) -> None:
        body = {
            "model": model, "prompt": prompt, "max_tokens": trace.tokens, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        async with free, session.post(f"{url}/v1/completions", json=body) as response:
            content = await response.json(content_type=None)
            if response.status != 200:
                raise RuntimeError(f"{url} answered {response.status}: {content}")
            found = content["usage"]["completion_tokens"]
            if found != trace.tokens:
                raise RuntimeError(f"asked for {trace.tokens} tokens, got {found}")

    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(ask(session, prompt) for prompt in trace.prompts()))


def row(
    setup: str, policy: str | None, counters: Sequence[Counters], seconds: float
) -> dict[str, Any]:
    """The figures of one run: the sum over servers, each server's steps, the trace's time."""
    read = sum(each.kv_bytes_read for each in counters)
    guided = sum(each.kv_bytes_query_guided for each in counters)
    return {
        "setup": setup, "policy": policy, "kv_bytes_read": read, "kv_bytes_query_guided": guided,
        "read_share": round(read / guided, 4),
        "steps_tree": [each.steps_tree for each in counters],
        "steps_host": [sum(each.steps_host.values()) for each in counters],
        "seconds": round(seconds, 2),
    }  # fmt: skip


def measure(
    host: str, program: str, policies: Sequence[str], model: str, trace: Trace, count: int = 2,
    options: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for one server, then one for each policy of the router before `count` servers.

    Servers start anew for each row, with empty prefix caches, and get the host's `options`.
    """
    for policy in (None, *policies):
        with tempfile.TemporaryDirectory() as work, ExitStack() as running:
            folder = Path(work) / "state"
            number = 1 if policy is None else count
            servers = running.enter_context(
                replicas(host, number, model, folder, Path(work), options)
            )
            urls = [server.url for server in servers]
            url = urls[0]
            if policy is not None:
                url = running.enter_context(router(program, policy, urls, Path(work) / "router"))
            start = time.monotonic()
            asyncio.run(send(url, model, trace))
            seconds = time.monotonic() - start
            counters = [
                settled_counters(state_file(folder, server.command.port)) for server in servers
            ]
            setup = (
                ONE_SERVER if policy is None else f"{number} servers behind {Path(program).name}"
            )
            yield row(setup, policy, counters, seconds)
