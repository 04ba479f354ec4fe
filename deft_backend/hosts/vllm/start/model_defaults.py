"""Apply the settings that vLLM makes for a model's attention if the user names no backend."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from deft_backend.hosts.vllm.versions import is_ours

SETTINGS = ("Gemma4Config", "DiffusionGemmaModelForBlockDiffusionConfig",
            "EmbeddingGemma2ModelConfig")  # fmt: skip
"""Classes of ``model_executor/models/config.py`` that check whether the user named a backend."""

_last: tuple[Any, AttentionBackendEnum | None] | None = None


def apply_model_defaults(vllm_config: Any) -> AttentionBackendEnum | None:
    """Let vLLM apply, once, its settings for the model without ``--attention-backend``.

    For example, the layers of Gemma 4 have heads of two sizes. vLLM sets one version of
    FlashAttention, or one backend, for all of them.

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
