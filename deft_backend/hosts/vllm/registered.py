"""The names that vLLM resolves to classes; the server's configuration decides the class."""

from typing import Any

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from deft_backend.hosts.common.latches import OnceLog
from deft_backend.hosts.vllm.versions import PLACEHOLDER, is_ours, refuse
from deft_backend.settings.config import Settings

MODELS_WITH_DEFAULTS = (
    "Gemma4Config",
    "DiffusionGemmaModelForBlockDiffusionConfig",
    "EmbeddingGemma2ModelConfig",
)
"""Classes of ``model_executor/models/config.py`` that check whether the user named a backend."""

log = OnceLog()

_defaults: tuple[Any, AttentionBackendEnum | None] | None = None
"""The last configuration whose model's defaults were applied, and the backend among them."""

_made: dict[str, Any] = {}
"""Classes that :class:`Custom` has chosen, by the name under which the host looks them up."""


class Custom(AttentionBackend):  # type: ignore[misc]
    """The plugin under its names in vLLM: it finds the host's own backend and surrounds it.

    vLLM asks a selected backend whether it supports a layer's configuration, and then for its name
    (``platforms/cuda.py``). At the first question, this class asks the host for its own choice. The
    second answer is the class around that choice, or the choice itself if it cannot be surrounded.
    """

    _chosen: Any = None

    @classmethod
    def validate_configuration(cls, device_capability: Any, **config: Any) -> list[str]:
        from vllm.config import get_current_vllm_config_or_none
        from vllm.platforms import current_platform
        from vllm.utils.import_utils import resolve_obj_by_qualname
        from vllm.v1.attention.selector import AttentionSelectorConfig

        wanted = None
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is not None:
            wanted = apply_model_defaults(vllm_config)
            if "use_non_causal" in config:  # set before the defaults were applied
                config["use_non_causal"] = vllm_config.attention_config.use_non_causal
        fallback = Settings.from_env().fallback_backend
        try:
            path = current_platform.get_attn_backend_cls(
                wanted if fallback is None else _fallback(fallback),
                AttentionSelectorConfig(**config),
            )
        except ValueError as error:
            return [str(error)]
        host = resolve_obj_by_qualname(path)
        cls._chosen, reason = _around(host)
        if reason is not None:
            log.warn(f"{host.get_name()} decodes without tree attention: {reason}")
        return []

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        if cls._chosen is None:
            return cls.__module__, cls.__qualname__
        module, name = cls._chosen.full_cls_name()
        return module, name

    @staticmethod
    def get_name() -> str:
        return PLACEHOLDER

    @staticmethod
    def get_impl_cls() -> Any:
        raise RuntimeError("vLLM asked for the plugin's classes before it configured any layer")

    get_builder_cls = get_impl_cls


def apply_model_defaults(vllm_config: Any) -> AttentionBackendEnum | None:
    """Let vLLM apply, once, its settings for the model as if the user had named no backend.

    For example, one version of FlashAttention for both sizes of Gemma 4's heads. Returns the
    backend that vLLM names for the model, if it names one.
    """
    global _defaults
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    if _defaults is not None and _defaults[0] is vllm_config:
        return _defaults[1]
    attention = vllm_config.attention_config
    asked, wanted = attention.backend, None
    settings = MODELS_CONFIG_MAP.get(getattr(vllm_config.model_config, "architecture", None))
    if is_ours(asked) and settings is not None and settings.__name__ in MODELS_WITH_DEFAULTS:
        attention.backend = None
        try:
            settings.verify_and_update_config(vllm_config)
            wanted = attention.backend
        finally:
            attention.backend = asked
    _defaults = (vllm_config, wanted)
    return wanted


def _around(host: Any) -> tuple[Any, str | None]:
    reason = refuse()
    if reason is not None:
        return host, reason
    from deft_backend.hosts.vllm.backend import cannot_surround, tree_backend

    reason = cannot_surround(host)
    if reason is not None:
        return host, reason
    surrounded = tree_backend(host)
    _made[surrounded.__qualname__] = surrounded
    return surrounded, None


def _fallback(name: str) -> AttentionBackendEnum:
    names = [member.name for member in AttentionBackendEnum if not is_ours(member)]
    if name not in names:
        raise ValueError(
            f"DEFT_FALLBACK_BACKEND is {name!r}; expected one of {', '.join(sorted(names))}"
        )
    return AttentionBackendEnum[name]


def __getattr__(name: str) -> Any:
    if name in _made:
        return _made[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
