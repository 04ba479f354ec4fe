"""Head shapes of a command: from its options, or from a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from deft_backend.cli.errors import fail, reported
from deft_backend.cli.models import ChosenModel, ModelFilesError, chosen_model, text_config
from deft_backend.shapes import EIGHT_BIT_CACHES, SHORT_DTYPES, AttentionShape

if TYPE_CHECKING:
    import torch

    from deft_backend.costs.table_lookup import TableInUse
    from deft_backend.costs.tables import TableKey

ShapeModelOption = Annotated[
    str | None, Option(help="Checkpoint folder or hub name: its heads, dimension and dtype.")
]
HeadDimOption = Annotated[int | None, Option(min=1, help="Head dimension; default: 128.")]

_MODELS_WITH_SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa")
"""Model types whose layers all have sinks: no field of their ``config.json`` says so."""


class HeadShape(NamedTuple):
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    # Of the model's layers.
    soft_cap: bool = False
    sinks: bool = False

    @property
    def heads(self) -> str:
        return f"{self.query_heads}/{self.kv_heads}"


def parse_heads(heads: str) -> tuple[int, int]:
    try:
        query_heads, kv_heads = (int(part) for part in heads.split("/"))
        if min(query_heads, kv_heads) < 1 or query_heads % kv_heads:
            raise ValueError
    except ValueError:
        raise fail(
            f"--heads is {heads!r}; expected QUERY/KV such as 32/8, the first a multiple of the "
            "second"
        ) from None
    return query_heads, kv_heads


def chosen_shape(
    model: str | None,
    heads: str | None,
    head_dim: int | None,
    dtype: str | None,
    *,
    default_dtype: str,
) -> HeadShape:
    if dtype not in (None, "fp16", "bf16"):
        raise fail(f"--dtype is {dtype!r}; expected fp16 or bf16")
    if model is None:
        name = SHORT_DTYPES[dtype or default_dtype]
        return HeadShape(*parse_heads("32/8" if heads is None else heads), head_dim or 128, name)
    for option, value in (("--heads", heads), ("--head-dim", head_dim)):
        if value is not None:
            raise fail(f"{option} and --model both set the shape; leave one of them out")
    shape = model_shape(chosen_model(model))
    # A server may use another dtype than the checkpoint's.
    return shape if dtype is None else shape._replace(dtype=SHORT_DTYPES[dtype])


def model_shape(model: ChosenModel) -> HeadShape:
    """The heads that a model's ``config.json`` describes; fails in one line."""
    with reported(ModelFilesError):
        path = model.file("config.json")
    if path is None:
        raise fail(f"the model {model.name} has no config.json; its attention's shape is unknown")
    try:
        return _heads_of(model, _text_config(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise fail(f"cannot read the attention's shape from {path}: {error!r}") from None


def _heads_of(model: ChosenModel, config: Mapping[str, Any]) -> HeadShape:
    query_heads = int(config["num_attention_heads"])
    if config.get("kv_lora_rank"):
        raise fail(
            f"{model.name} has latent attention (MLA), so its heads have no keys and values of "
            "their own; a server compiles and checks its kernels at its start"
        )
    sinks = config.get("model_type") in _MODELS_WITH_SINKS
    return HeadShape(
        query_heads,
        int(config.get("num_key_value_heads") or query_heads),
        int(config.get("head_dim") or config["hidden_size"] // query_heads),
        _dtype_of(model, config),
        soft_cap=bool(config.get("attn_logit_softcapping")),
        sinks=sinks or bool(config.get("add_full_attention_sink_bias")),
    )


def eight_bit_cache(name: str) -> str | None:
    """The dtype of a KV cache in the hosts' words; None for the queries' own."""
    if name != "auto" and name not in EIGHT_BIT_CACHES:
        names = ", ".join(EIGHT_BIT_CACHES)
        raise fail(f"--kv-cache-dtype is {name!r}; expected auto or one of {names}")
    return EIGHT_BIT_CACHES.get(name)


def _dtype_of(model: ChosenModel, config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float16")
    dtype = dtype.removeprefix("torch.")
    if dtype not in SHORT_DTYPES.values():
        known = ", ".join(SHORT_DTYPES.values())
        raise fail(f"the dtype of {model.name} is {dtype!r}; expected one of {known}")
    return dtype


def this_device() -> torch.device:
    import torch

    from deft_backend.tools.servers.command import use_gpu

    return torch.device("cuda", torch.cuda.current_device()) if use_gpu() else torch.device("cpu")


def table_of(shape: HeadShape, page_size: int = 1) -> tuple[TableKey, TableInUse]:
    import torch

    from deft_backend.costs.table_lookup import table_in_use, table_key
    from deft_backend.costs.tables import gpu_facts
    from deft_backend.files.folders import tables_directory

    device = this_device()
    kind = getattr(torch, shape.dtype)
    key = table_key(AttentionShape(*shape[:3], kind, kind, device, page_size))
    return key, table_in_use(key, tables_directory(), gpu_facts(device))


def _text_config(path: Path) -> Mapping[str, Any]:
    config = text_config(path)
    if "num_attention_heads" in config:
        return config
    try:
        known: Any = import_module("transformers").AutoConfig.from_pretrained(
            path.parent, trust_remote_code=False
        )
    except (ImportError, OSError, ValueError, KeyError):
        return config  # transformers is not installed, or does not know the model
    full = known.get_text_config().to_dict()
    return {**full, "dtype": full.get("dtype") or known.dtype}
