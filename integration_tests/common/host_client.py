"""The host's own benchmark client, run for its answers."""

import asyncio
import json

from benchmarks.e2e.host_clients import HostClient, requests_of
from benchmarks.e2e.served_model import Model
from integration_tests.common.server import MODEL


def answers_of(host, server, folder):
    """Texts of the client's greedy answers, in the order of its prompts.

    The prompts come from 8 prefixes of 256 tokens, more than the caches of these tests hold.
    """
    with server.open("v1/models") as response:
        name = json.loads(response.read())["data"][0]["id"]
    client = HostClient(host, "evicting", timeout=300, answers=True, served_name=name)
    model = Model(str(MODEL), "tiny", ids=256, context=2048)
    run = client.run(server.process.url, model, server.process.command.environment, folder)
    texts = asyncio.run(run)["generated_texts"]
    assert len(texts) == requests_of(client)
    assert all(texts)
    return texts
