"""Engines of the zoo, one after the other: ours answers, and the host's checks its answers.

``python -m integration_tests.zoo.engines JOB...`` reads files of jobs and writes their verdicts.
"""

import json
import logging
import os
import random
import sys
import traceback
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.e2e.answers import Checked, answer_check, next_question, tolerance_of
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.servers.command import BACKEND_NAMES, free_port

LIKELIEST = 5

SHARPNESS = 1.5
"""Scale of the projections to queries and keys: attention is neither uniform nor one-hot."""

ROUTING = 8.0
"""Scale of the routers to experts, so that two experts are seldom nearly equally good. Rounding
would choose between such experts, and another expert gives another answer."""

EXPERTS = 0.1
"""Scale of what experts add to the residual: another expert, which rounding chose after all, then
changes an answer little. Attention adds as much as in models without experts."""


FILLED = "the zoo has filled a model"
"""In the log of each engine: hosts go on without a plugin that fails."""


def fill(model):
    """Replace a model's parameters; they depend on each parameter's name and shape alone.

    The weights that hosts make up are so small that attention does not change an answer. With
    these, answers depend on every layer and on every part of the KV cache.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.copy_(_values(name, parameter))
    print(FILLED, flush=True)


def _values(name, parameter):
    """Values of the parameter's shape, in float32 on the CPU."""
    shape = tuple(parameter.shape)
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    last = name.rsplit(".", 1)[-1]
    if "sink" in name:
        return normal + 1.0
    if len(shape) < 2:
        if "norm" in name and last == "weight":
            return torch.ones(shape)
        if ("bias" in last or "correction" in last) and "dt" not in last:
            return torch.zeros(shape)
        return 0.5 * normal
    if "embed" in name:
        return normal
    width = shape[-1] if "conv" not in name else shape[-1] * shape[-2]
    scale = 3.0 if "lm_head" in name else SHARPNESS if "qkv" in name else 1.0
    if "router" in name or name.endswith(".gate.weight"):
        scale = ROUTING
    if "experts" in name and ("w2" in name or "down_proj" in name):
        scale = EXPERTS
    return normal.mul_(scale * width**-0.5)


def install():
    """Fill made-up models as this module does, in every process of an engine: a plugin of hosts."""
    if find_spec("sglang") is not None:
        from sglang.srt.model_loader import loader

        loader.initialize_dummy_weights = fill
        return
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.platforms import current_platform

    made_up = DummyModelLoader.load_weights

    def load_weights(self, model, model_config):
        made_up(self, model, model_config)
        fill(model)

    DummyModelLoader.load_weights = load_weights
    # Without a GPU, each engine's worker looks through all modules for Triton kernels to replace,
    # and fails at one of Numba's. The first worker of a process has replaced them all.
    name = "register_triton_kernel_overrides"
    if current_platform.is_cpu() and hasattr(current_platform, name):
        setattr(type(current_platform), name, staticmethod(cache(getattr(current_platform, name))))


class SGLang:
    """SGLang's engine. `options` are arguments of the server, with underscores."""

    def __init__(self, model, backend, options):
        import sglang

        common = {"load_format": "dummy", "skip_tokenizer_init": True, "log_level": "info"}
        self._engine = sglang.Engine(
            model_path=model,
            port=free_port(),
            attention_backend=backend,
            sampling_backend="pytorch",
            **common,
            **options,
        )

    def answer(self, prompts, tokens):
        """Greedy answers of exactly these lengths, all prompts in one batch."""
        sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in tokens]
        found = self._engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=sampling,
            return_logprob=True,
            top_logprobs_num=LIKELIEST,
        )
        return [
            Answer(
                ids=list(answer["output_ids"]),
                logprobs=[float(t[0]) for t in answer["meta_info"]["output_token_logprobs"]],
                top=[
                    {token[1]: token[0] for token in likely}
                    for likely in answer["meta_info"]["output_top_logprobs"]
                ],
            )
            for answer in found
        ]

    def close(self):
        self._engine.shutdown()


class VLLM:
    def __init__(self, model, backend, options):
        from vllm import LLM

        attention = {} if backend is None else {"attention_backend": backend}
        common = {"load_format": "dummy", "skip_tokenizer_init": True, "disable_log_stats": True}
        self._engine = LLM(model=model, **common, **attention, **options)

    def answer(self, prompts, tokens):
        from vllm import SamplingParams

        common = {"temperature": 0, "ignore_eos": True, "logprobs": LIKELIEST, "detokenize": False}
        requests = self._engine.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [SamplingParams(max_tokens=count, **common) for count in tokens],
            use_tqdm=False,
        )
        found = []
        for request in requests:
            answer = request.outputs[0]
            top = [{t: held.logprob for t, held in place.items()} for place in answer.logprobs]
            ids = list(answer.token_ids)
            logprobs = [held[token] for held, token in zip(top, ids, strict=True)]
            found.append(Answer(ids=ids, logprobs=logprobs, top=top))
        return found

    def close(self):
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        del self._engine
        cleanup_dist_env_and_memory()


def requests(ids, prefix, branch, leaves, tokens):
    """A prompt that fills the prefix cache, the prompts that decode at once, and tokens of each.

    Two branches of a prefix, each with `leaves` prompts; one prompt twice, and one that shares
    nothing. Prompts use token ids below `ids`.
    """
    choose = random.Random(ids)

    def draw(count):
        return tuple(choose.randrange(8, ids) for _ in range(count))

    root = draw(prefix)
    branches = [root + draw(branch) for _ in range(2)]
    prompts = [way + draw(choose.randint(1, 12)) for way in branches for _ in range(leaves)]
    return root, (*prompts, prompts[0], draw(prefix // 2)), tokens


def check(engine, prompts, answers, tolerance):
    """Compare with what `engine` answers, all answers in a batch; returns the counts."""
    found = Checked()
    asked = {
        each: next_question(each, None)
        for each in (
            answer_check(number, prompt, answer, tolerance, found)
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        )
    }
    while asked := {each: question for each, question in asked.items() if question is not None}:
        replies = engine.answer(*map(list, zip(*asked.values(), strict=True)))
        pairs = zip(asked, replies, strict=True)
        asked = {each: next_question(each, reply) for each, reply in pairs}
    return found


def run(job):
    """Let our backend answer and the host's own check; each has a log of its own."""
    folder = Path(job["folder"])
    first, batch, tokens = requests(**job["shape"])
    make = SGLang if job["host"] == "sglang" else VLLM
    answers = None
    for log, backend in (("deft.log", BACKEND_NAMES[job["host"]]), ("host.log", None)):
        with (folder / log).open("w") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
        engine = make(job["model"], backend, {**job["options"], "dtype": job["dtype"]})
        try:
            engine.answer([first], [1])
            assert FILLED in (folder / log).read_text(errors="replace")
            if answers is None:
                found = engine.answer(batch, [tokens] * len(batch))
                answers = [answer.ids for answer in found]
            else:
                tolerance = tolerance_of(job["dtype"], job["options"].get("kv_cache_dtype"))
                verdict = check(engine, batch, answers, tolerance)
                (folder / "verdict.json").write_text(json.dumps(verdict.to_dict(tolerance)))
        finally:
            engine.close()


def main(paths):
    """Do the jobs. A job that fails leaves its error in the log; the next one still runs."""
    failed = False
    for path in paths:
        try:
            run(json.loads(Path(path).read_text()))
        except Exception:
            failed = True
            traceback.print_exc()
    sys.stdout.flush()
    # The engines have done their work. vLLM's in this process would take long to end.
    os._exit(failed)


if __name__ in ("__main__", "__mp_main__"):  # SGLang's processes import the main module again
    # The plugin's lines go to the job's log, whichever way the host sets up its own log.
    logger = logging.getLogger("deft_backend")
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO)
    logger.propagate = False

if __name__ == "__main__":
    main(sys.argv[1:])
