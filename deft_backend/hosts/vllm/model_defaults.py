"""What vLLM sets for a model's attention where no backend is asked for; with ours none is."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from deft_backend.hosts.vllm.versions import is_ours

SETTINGS = ("Gemma4Config", "DiffusionGemmaModelForBlockDiffusionConfig")
"""Classes of ``model_executor/models/config.py`` that look at whether a backend was asked for."""

_last: tuple[Any, AttentionBackendEnum | None] | None = None


def apply_model_defaults(vllm_config: Any) -> AttentionBackendEnum | None:
    """Let vLLM set what it sets for the model without ``--attention-backend``, once.

    Gemma 4, whose layers have heads of two sizes, gets one version of FlashAttention or one backend
    for all of its layers.

    Returns
    -------
    AttentionBackendEnum, optional
        The backend that vLLM names for the model, if it names one.
    """
    global _last
    if _last is None or _last[0] is not vllm_config:
        _last = (vllm_config, _apply(vllm_config))
    return _last[1]


def _apply(vllm_config: Any) -> AttentionBackendEnum | None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    attention = vllm_config.attention_config
    settings = MODELS_CONFIG_MAP.get(getattr(vllm_config.model_config, "architecture", None))
    asked = attention.backend
    if not is_ours(asked) or settings is None:
        return None
    if settings.__name__ not in SETTINGS:
        return None
    attention.backend = None
    try:
        settings.verify_and_update_config(vllm_config)
        return attention.backend
    finally:
        attention.backend = asked
