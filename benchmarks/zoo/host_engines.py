"""The hosts' engines, made in this process or, for SGLang, in its children."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any

from benchmarks.zoo.prompts import Prompt
from benchmarks.zoo.random_values import fill
from deft_backend.tools.harness.answers import Answer

LIKELIEST = 5


class _AfterImport(MetaPathFinder):
    """Changes a module as soon as something imports it, and not before."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


def fill_models_of_sglang() -> None:
    """Let SGLang's ``--load-format dummy`` fill models as this package does.

    Called in every process that imports the worker, because SGLang starts processes of its own.
    Most of them make no model, and importing the loader takes seconds.
    """

    def change(loader: Any) -> None:
        loader.initialize_dummy_weights = fill

    sys.meta_path.insert(0, _AfterImport("sglang.srt.model_loader.loader", change))


def fill_models_of_vllm() -> None:
    """Let vLLM's ``--load-format dummy`` fill models as this package does."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    made_up = DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        made_up(self, model, model_config)
        fill(model)

    DummyModelLoader.load_weights = load_weights


def register_kernels_of_vllm_once() -> None:
    """Let a second engine of vLLM start in this process.

    Without a GPU, each of its workers looks through all modules for Triton kernels to replace, and
    fails at one of Numba's. The first worker has replaced them all.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if current_platform.is_cpu() and hasattr(platform, "register_triton_kernel_overrides"):
        platform.register_triton_kernel_overrides = staticmethod(
            cache(current_platform.register_triton_kernel_overrides)
        )


class SGLang:
    """SGLang's engine. `options` are arguments of the server, with underscores."""

    def __init__(self, model: str, backend: str | None, options: Mapping[str, Any]) -> None:
        import sglang

        self._engine = sglang.Engine(
            model_path=model, attention_backend=backend, load_format="dummy",
            skip_tokenizer_init=True, sampling_backend="pytorch", log_level="info", **options,
        )  # fmt: skip

    def answer(self, prompts: Sequence[Prompt], tokens: Sequence[int]) -> list[Answer]:
        found = self._engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=[
                {"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for count in tokens
            ],
            return_logprob=True,
            top_logprobs_num=LIKELIEST,
        )
        return [_of_sglang(answer) for answer in found]

    def close(self) -> None:
        self._engine.shutdown()


def _of_sglang(answer: Mapping[str, Any]) -> Answer:
    about = answer["meta_info"]
    return Answer(
        ids=list(answer["output_ids"]),
        logprobs=[float(token[0]) for token in about["output_token_logprobs"]],
        top=[{token[1]: token[0] for token in likely} for likely in about["output_top_logprobs"]],
    )


class VLLM:
    """vLLM's engine, in this process."""

    def __init__(self, model: str, backend: str | None, options: Mapping[str, Any]) -> None:
        from vllm import LLM

        attention = {} if backend is None else {"attention_backend": backend}
        self._engine = LLM(
            model=model, load_format="dummy", skip_tokenizer_init=True, disable_log_stats=True,
            **attention, **options,
        )  # fmt: skip

    def answer(self, prompts: Sequence[Prompt], tokens: Sequence[int]) -> list[Answer]:
        from vllm import SamplingParams

        found = self._engine.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [
                SamplingParams(
                    temperature=0,
                    max_tokens=count,
                    ignore_eos=True,
                    logprobs=LIKELIEST,
                    detokenize=False,
                )
                for count in tokens
            ],
            use_tqdm=False,
        )
        return [_of_vllm(request.outputs[0]) for request in found]

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        del self._engine
        cleanup_dist_env_and_memory()


def _of_vllm(answer: Any) -> Answer:
    likely: list[Mapping[Any, float]] = [
        {token: held.logprob for token, held in place.items()} for place in answer.logprobs
    ]
    ids = list(answer.token_ids)
    return Answer(
        ids=ids, logprobs=[held[token] for held, token in zip(likely, ids, strict=True)], top=likely
    )
