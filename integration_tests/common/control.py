"""Use a server's control endpoints while its requests decode, and change its weights."""

import asyncio
import shutil
import time

import torch
from safetensors.torch import load_file, save_file

from integration_tests.common.answers import assert_same
from integration_tests.common.server import REQUEST_SECONDS, complete


def while_decoding(server, asks, act):
    """Send all requests, call `act` as soon as tokens arrive, and return the answers.

    One more request streams, and so shows when the server decodes.
    """

    async def traffic():
        async with server.client() as client:
            begun = asyncio.Event()
            seen = complete(client, asks[0], begun=begun, stream=True, n=1)
            answers = [asyncio.create_task(complete(client, ask)) for ask in asks]
            streaming = asyncio.create_task(seen)
            await asyncio.wait_for(begun.wait(), REQUEST_SECONDS)
            await asyncio.to_thread(act)
            await streaming
            return list(await asyncio.gather(*answers))

    return asyncio.run(traffic())


def check_while_decoding(server, reference, asks, act):
    assert_same(asks, while_decoding(server, asks, act), reference.answers(asks))
    assert not server.trouble()


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


def until(done, seconds=30.0):
    """Wait until it is done: a host notices only after a while that a client has left."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not done within {seconds} s"
        time.sleep(0.2)
