"""The server's side: samples behind a prompt, and new weights from a folder."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.e2e.pair import Progress, at_once
from deft_backend.tools.servers.command import free_port, server_command
from deft_backend.tools.servers.process import ServerProcess

REQUEST_SECONDS = 600.0


class Mode(NamedTuple):
    """How a server computes."""

    backend: str | None  # None: the host chooses
    policy: str | None = None
    deterministic: bool = False
    """By the host's own mode, which its CPU engine lacks."""


MODES = {
    "host": Mode(None),
    "host-deterministic": Mode(None, deterministic=True),
    "deft-auto": Mode("deft", "auto"),
    "deft-invariant": Mode("deft", "invariant", deterministic=True),
}


class Samples(NamedTuple):
    """A group's completions, all of the same length."""

    ids: list[list[int]]
    logprobs: list[list[float]]  # of each token, as the server drew it
    seconds: float


class Rollouts:
    """A running server, as a trainer uses it."""

    def __init__(self, process: ServerProcess) -> None:
        self._url = process.url

    def sample(self, prompt: Sequence[int], seeds: Sequence[int], tokens: int) -> Samples:
        """Completions of exactly `tokens` tokens, drawn from the model's own distribution.

        SGLang's deterministic mode draws by the seeds; without them, all samples would be equal.
        """
        drawn = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body = {
            "input_ids": [list(prompt)] * len(seeds),
            "sampling_params": [{**drawn, "sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
        }
        began = time.perf_counter()
        answers = self._post("generate", body)
        seconds = time.perf_counter() - began
        found = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
        ids = [[token for _, token, _ in answer] for answer in found]
        logprobs = [[logprob for logprob, _, _ in answer] for answer in found]
        assert [len(each) for each in ids] == [tokens] * len(seeds)
        return Samples(ids, logprobs, seconds)

    def load(self, folder: Path) -> None:
        """Take the weights in `folder`; the server forgets the KV cache of the old ones."""
        answer = self._post("update_weights_from_disk", {"model_path": str(folder)})
        assert answer["success"], answer["message"]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{path}", data, kind)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=REQUEST_SECONDS) as response:
            return json.load(response)


@contextmanager
def served(
    model: Path, flags: Mapping[str, Sequence[str]], logs: Path
) -> Iterator[dict[str, Rollouts]]:
    """Servers of `model` for a ``with`` block, by mode; all of them start at the same time.

    `flags` are further arguments of the host, by mode.
    """
    with ExitStack() as stack:
        found: dict[str, Rollouts] = {}

        def start(name: str, progress: Progress) -> None:
            mode = MODES[name]
            command = server_command(
                str(model),
                free_port(),
                backend=mode.backend,
                environment={"DEFT_POLICY": mode.policy} if mode.policy else None,
                host_arguments=flags[name],
            )
            process = ServerProcess(command, logs / f"{name}.log", progress=progress)
            found[name] = Rollouts(stack.enter_context(process))

        at_once([partial(start, name) for name in flags])
        yield {name: found[name] for name in flags}
