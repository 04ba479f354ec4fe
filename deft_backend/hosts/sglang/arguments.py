"""How ``--attention-backend deft`` is read while the host resolves its arguments. The host resolves
everything as if the flag had not been passed. A mark in the arguments tells the plugin to put tree
attention around that backend, in the processes that build it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from deft_backend.hosts.common.contract import matches
from deft_backend.hosts.common.limits import other_policy
from deft_backend.hosts.sglang import versions
from deft_backend.hosts.sglang.versions import SGLANG
from deft_backend.settings.config import LOG_LEVELS, Settings, SettingsError
from deft_backend.shapes import EIGHT_BIT_CACHES, gains_nothing

logger = logging.getLogger("deft_backend")

NAME = "deft"
HOST_DECODE = "_deft_host_decode"
"""The mark: an attribute of the host's arguments that names its own decode backend."""

SURROUNDED = "deft_surrounds"  # an attribute of the factories that the plugin has surrounded

_FIELDS = (
    "attention_backend",
    "decode_attention_backend",
    "prefill_attention_backend",
    "speculative_draft_attention_backend",
)


def resolve(resolve_host: Callable[[Any], Any], server_args: Any) -> Any:
    """Resolve the host's arguments; remove ``deft`` before and set the mark after. Raises
    SettingsError for a ``DEFT_*`` value that is not allowed; SystemExit if a command line starts
    the server: a traceback would hide the message.
    """
    asked = [name for name in _FIELDS if _is_ours(getattr(server_args, name, None))]
    if not asked or getattr(server_args, "_resolution_finished", False):
        return resolve_host(server_args)

    settings = _settings()
    logger.setLevel(LOG_LEVELS[settings.log])
    named = getattr(server_args, "decode_attention_backend", None) or server_args.attention_backend
    decodes = named is None or _is_ours(named)
    for name in asked:
        setattr(server_args, name, None)
    if settings.fallback_backend is not None and server_args.attention_backend is None:
        server_args.attention_backend = settings.fallback_backend
    reason = SGLANG.refuse()
    if decodes and reason is None and _may_outgrow_plans(server_args):
        from deft_backend.planner.on_device import largest_batch

        server_args.max_running_requests = min(settings.max_batch, largest_batch())
    result = resolve_host(server_args)
    if not decodes:
        logger.warning(
            "deft: %s selects deft, which only decodes, but another backend is selected for "
            "decode; all attention runs through the host's own backends. Select deft for decode as "
            "well",
            ", ".join(asked),
        )
        return result
    if reason is not None:
        logger.warning("deft: %s; all attention runs through the host's own backend", reason)
        return result
    decode = versions.backend_names(server_args)[1]
    if decode is None:  # placeholder model: the host resolves no backends for it
        return result
    role = versions.disaggregation_role(server_args)
    if role == "prefill":
        logger.info("deft: a prefill server decodes nothing; the host's own backend runs it")
        return result
    try:
        reason = unsupported(server_args, settings)
        without_graphs = _without_graphs(server_args, settings)
        sized = versions.is_set("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")
        if reason is None and without_graphs is not None and sized:
            # The host sizes its KV cache after the capture, so its memory plan needs the graphs.
            reason = f"{without_graphs}, and SGLANG_ENABLE_POST_CAPTURE_KV_SIZING needs graphs"
    except Exception as error:
        reason = f"this SGLang is not supported ({error!r})"
    if reason is not None:
        logger.warning(
            "deft: %s; all attention runs through the host's own backend (%s)", reason, decode
        )
        return result
    if role == "decode without radix cache":
        logger.warning(
            "deft: this decode server has no radix cache, so its requests share no KV and tree "
            "attention saves nothing. Give --disaggregation-decode-enable-radix-cache"
        )
    if without_graphs is not None:
        logger.warning(
            "deft: decode runs without CUDA graphs, which cannot hold tree attention here: %s",
            without_graphs,
        )
    if without_graphs is not None or versions.resolved(server_args).device != "cuda":
        versions.disable_decode_graphs(server_args)
    setattr(server_args, HOST_DECODE, decode)
    return result


def _is_ours(name: object) -> bool:
    """Whether a backend's name is ours: vLLM spells its names in capitals, SGLang does not."""
    return isinstance(name, str) and name.lower() == NAME


def _settings() -> Settings:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    known = sorted(name for name in ATTENTION_BACKENDS if not _is_ours(name))
    try:
        settings = Settings.from_env()
        name = settings.fallback_backend
        if name not in (None, *known):
            raise SettingsError(
                f"DEFT_FALLBACK_BACKEND is {name!r}; expected one of {', '.join(known)}"
            )
    except SettingsError as error:
        if any("attention-backend" in word for word in sys.argv):
            raise SystemExit(f"deft: {error}") from None
        raise
    return settings


def _may_outgrow_plans(server_args: Any) -> bool:
    """Whether the host may allow more requests than the plans of deterministic inference hold.
    It has a lower limit itself for servers that draft, and ranks of DP attention are refused.
    """
    asked = ("enable_deterministic_inference", "rl_on_policy_target")  # the second asks for both
    others = ("max_running_requests", "speculative_algorithm", "enable_dp_attention")
    deterministic = any(getattr(server_args, name, None) for name in asked)
    return deterministic and not any(getattr(server_args, name, None) for name in others)


def unsupported(server_args: Any, settings: Settings) -> str | None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    decode = versions.backend_names(server_args)[1]
    if not hasattr(ATTENTION_BACKENDS.get(decode), SURROUNDED):
        return "the backend for decode is one of a plugin that SGLang loads after deft"
    missing = versions.missing()
    if missing is not None:
        return f"this SGLang lacks a member that tree attention uses ({missing})"
    args = versions.resolved(server_args)
    if str(args.device) not in ("cuda", "cpu"):
        return f"device {args.device} is not supported (cuda and cpu are)"
    for name, what in _FEATURES:
        value = getattr(args, name, None)
        if value:
            return f"{what} is not supported ({name}={value})"
    for name in ("dcp_size", "attn_cp_size"):
        if getattr(args, name, 1) not in (None, 1):
            return f"context parallelism is not supported ({name}={getattr(args, name)})"
    reason = _unsupported_speculation(args, versions.backend_names(server_args))
    deterministic = versions.deterministic(server_args)
    if reason is None and deterministic:  # results must not depend on the batch
        reason = other_policy(settings, "deterministic inference")
        if getattr(args, "enable_mixed_chunk", False):
            reason = "deterministic inference with steps that also prefill is not supported"
        if versions.decodes_per_rank(server_args):  # a rank may prefill what it decodes
            reason = "deterministic inference with DP attention is not supported"
    if reason is not None:
        return reason
    if versions.uses_mla(server_args):
        if deterministic:
            return "deterministic inference of MLA models is not supported"
        return _refused_latent(server_args) or SGLANG.leaves_mla(settings, str(args.device))
    kv_dtype = str(args.kv_cache_dtype)
    if kv_dtype not in (*_WIDE_DTYPES, *EIGHT_BIT_CACHES):
        return f"a KV cache of kind {kv_dtype} is not supported (kv_cache_dtype={kv_dtype})"
    if versions.model_config(server_args).is_encoder_decoder:
        return "encoder-decoder models are not supported"
    return None


_WIDE_DTYPES = ("auto", "bf16", "bfloat16", "float16", "float32")
_LATENT_BACKENDS = {"cuda": ("fa3",), "cpu": ("torch_native", "intel_amx")}
"""The host's backends whose MLA kernel takes a plan, by device. A stand-in runs on the CPU."""


def _refused_latent(server_args: Any) -> str | None:
    args, model = versions.resolved(server_args), versions.model_config(server_args)
    if getattr(getattr(model, "hf_text_config", None), "index_topk", None):
        return "sparse MLA is not supported (index_topk)"
    backend, wanted = versions.backend_names(server_args)[1], _LATENT_BACKENDS[str(args.device)]
    if backend not in wanted:
        return f"MLA through {backend} is not supported ({' or '.join(wanted)} is)"
    if str(args.kv_cache_dtype) not in _WIDE_DTYPES:
        return f"MLA over a KV cache of kind {args.kv_cache_dtype} is not supported"
    tokens = versions.draft_tokens(server_args)
    if tokens > 1 and versions.drafts_trees(server_args):
        return "MLA with token trees is not supported (chains are: speculative_eagle_topk=1)"
    if versions.decodes_per_rank(server_args):
        return "DP attention keeps all heads on each rank, so sharing would gain nothing for MLA"
    return gains_nothing(int(model.num_attention_heads) // int(args.tp_size), tokens)


_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH")
"""Speculative algorithms that verify chains or token trees of one size."""


def _unsupported_speculation(args: Any, backends: tuple[str | None, str | None]) -> str | None:
    algorithm = getattr(args, "speculative_algorithm", None)
    if algorithm is None:
        return None
    if str(algorithm).upper() not in _ALGORITHMS:
        return f"speculation by {algorithm} is not supported ({', '.join(_ALGORITHMS)} are)"
    version = SGLANG.installed() or SGLANG.lowest
    if str(algorithm).upper() == "DFLASH" and matches(version, "<0.5.23"):
        return f"speculation by DFLASH is not supported before SGLang 0.5.23 (this is {version})"
    if getattr(args, "speculative_adaptive", False):
        return "drafts of varying length are not supported (speculative_adaptive)"
    mode = getattr(args, "speculative_attention_mode", None)
    if mode == "prefill" and backends[0] != backends[1]:
        return (
            f"verification goes to the backend for prefill ({backends[0]}); for tree attention, "
            "give --speculative-attention-mode decode"
        )
    return None


_FEATURES = (
    ("enable_pd_role_switch", "switching between prefill and decode"),
    ("disaggregation_decode_enable_offload_kvcache", "a decode server's KV offload"),
    ("enable_two_batch_overlap", "two-batch overlap"),
    ("enable_pdmux", "prefill-decode multiplexing"),
    ("enable_torch_compile", "torch.compile"),
    ("enable_hisparse", "hierarchical sparse attention"),
    ("enable_unified_memory", "the unified memory pool"),
    ("enable_page_major_kv_layout", "the page-major KV layout"),
    ("enable_kv_cache_sharding", "KV cache sharding"),
    ("enable_nvidia_megakernel", "the megakernel"),
    ("dllm_algorithm", "diffusion decoding"),
)
"""Arguments of the host that, if set, change what a decode batch is; and what they switch on."""


def _without_graphs(server_args: Any, settings: Settings) -> str | None:
    """Why decode runs without CUDA graphs, which cannot hold tree attention here, or None."""
    kind = versions.decode_graphs(server_args)
    if kind == "disabled" or versions.resolved(server_args).device != "cuda":
        return None
    if settings.verify:
        return "DEFT_VERIFY compares every step with the host's kernel"
    if versions.is_set("SGLANG_ENABLE_METADATA_GLUE_GRAPH"):  # 0.5.19 on
        return "SGLANG_ENABLE_METADATA_GLUE_GRAPH hides replays from the attention backend"
    return None if kind == "full" else f"decode graphs are of the kind {kind}, not full"
