"""Use a server's control endpoints while its requests decode, and change its weights."""

import asyncio
import json
import shutil
import threading
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors.torch import load_file, save_file

from integration_tests.common.answers import assert_same
from integration_tests.common.host_client import texts_of
from integration_tests.common.server import MODEL, complete


def while_decoding(server, asks, act):
    """Send all requests, call `act` as soon as tokens arrive, and return the answers.

    One more request streams, and so shows when the server decodes.
    """

    async def traffic():
        async with server.client() as client:
            body = {**asks[0].body(), "stream": True, "n": 1}
            stream = await client.completions.create(**body)
            answers = [asyncio.create_task(complete(client, ask)) for ask in asks]
            acting = None
            async for _ in stream:
                acting = acting or asyncio.ensure_future(asyncio.to_thread(act))
            assert acting is not None, "no token arrived"
            await acting
            return list(await asyncio.gather(*answers))

    return asyncio.run(traffic())


def check_while_decoding(server, reference, asks, act):
    """Check the answers of requests during which `act` is called."""
    assert_same(asks, while_decoding(server, asks, act), reference.answers(asks))
    assert not server.trouble()


def check_host_client(host, servers, folder, ask, act):
    """Check that a server answers the host's own client as the baseline does, though disturbed.

    Until the client ends, other clients send `ask` and hang up, and `act` is called, in turns.
    """
    server, baseline = servers
    expected = _answers_of(host, baseline, folder / "baseline")
    found = _disturbed(server, ask, act, lambda: _answers_of(host, server, folder / "ours"))
    assert found == expected
    assert not server.trouble()


def _disturbed(server, ask, act, work):
    """The result of `work`; until it ends, clients hang up and `act` is called, in turns."""
    done = threading.Event()

    async def hang_up():
        async with server.client() as client:
            stream = await client.completions.create(**{**ask.body(), "stream": True})
            async for _ in stream:
                break
            await stream.close()

    def disturb():
        turns = 0
        while not done.is_set():
            asyncio.run(hang_up())
            act()
            turns += 1
        return turns

    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(disturb)
        try:
            result = work()
        finally:
            done.set()
        assert disturbing.result() > 0
    return result


def ask_to(server, path, body=None):
    """Send a control request; returns the HTTP status."""
    try:
        with server.open(path, json.dumps(body or {}).encode()) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def changed_weights(model, folder):
    """A copy of a checkpoint in which every weight matrix differs a little."""
    copy = folder / "changed"
    shutil.copytree(model, copy)
    generator = torch.Generator().manual_seed(11)
    for file in sorted(copy.glob("*.safetensors")):
        weights = load_file(str(file))
        for name, weight in weights.items():
            if weight.dim() == 2:
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
                changed = weight.float() + 0.2 * weight.float().std() * noise
                weights[name] = changed.to(weight.dtype)
        save_file(weights, str(file), metadata={"format": "pt"})
    return copy


def _answers_of(host, server, folder):
    """The answers that the host's own client gets, from prefixes that evict each other."""
    with server.open("v1/models") as response:
        name = json.loads(response.read())["data"][0]["id"]
    environment = server.process.command.environment
    return texts_of(host, server.process.url, MODEL, name, environment, folder)
