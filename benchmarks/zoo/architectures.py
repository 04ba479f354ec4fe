"""The architectures of the zoo, each as the ``config.json`` of a small model.

The models keep what matters to attention: the kinds of layers and their order, the head dimension,
and the number of query heads that share a KV head. All other sizes are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCABULARY = 1024
WINDOW = 32
"""Tokens of sliding windows: shorter than every prompt."""


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes
    ----------
    title : str
        Its name in prose.
    config : mapping
        Its ``config.json``.
    tree : int
        Layers that decode through tree attention.
    dtype : str
        Dtype on the CPU; GPUs run bfloat16.
    cpu : tuple of str
        Hosts whose CPU engine runs it.
    ci : tuple of str
        Hosts that run it in the integration tests.
    """

    title: str
    config: Mapping[str, Any]
    tree: int
    dtype: str = "float32"
    cpu: tuple[str, ...] = ("vllm",)
    ci: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads and head dimension of the layers with full attention."""
        dim = self.config.get("global_head_dim") or self.config["head_dim"]
        return self.config["num_attention_heads"], self.config["num_key_value_heads"], dim


def _config(name: str, kind: str, heads: tuple[int, int, int], **changes: Any) -> dict[str, Any]:
    query, kv, dim = heads
    return {
        "architectures": [name], "model_type": kind, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": query, "num_key_value_heads": kv,
        "head_dim": dim, "vocab_size": VOCABULARY, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, **changes,
    }  # fmt: skip


def _layers(pattern: str) -> list[str]:
    """Types of layers from letters: full, sliding window, linear."""
    names = {"f": "full_attention", "s": "sliding_attention", "l": "linear_attention"}
    return [names[letter] for letter in pattern]


_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}  # fmt: skip

_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt-oss": Architecture(
        "gpt-oss",
        _config(
            "GptOssForCausalLM", "gpt_oss", (16, 2, 64), num_hidden_layers=4,
            layer_types=_layers("sfsf"), sliding_window=WINDOW, num_local_experts=4,
            num_experts_per_tok=2, experts_per_token=2, swiglu_limit=7.0, attention_bias=True,
            intermediate_size=256,
            rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0,
                          "truncate": False, "original_max_position_embeddings": 4096},
        ), tree=2, ci=("vllm",),
    ),
    "gemma3": Architecture(
        "Gemma 3",
        _config(
            "Gemma3ForCausalLM", "gemma3_text", (8, 2, 256), num_hidden_layers=3,
            layer_types=_layers("ssf"), sliding_window=WINDOW, query_pre_attn_scalar=256,
            hidden_activation="gelu_pytorch_tanh", rope_local_base_freq=10000.0,
        ), tree=1, cpu=("vllm", "sglang"), ci=("vllm",),
    ),
    "qwen3-next": Architecture(
        "Qwen3-Next",
        _config(
            "Qwen3NextForCausalLM", "qwen3_next", (16, 2, 256), num_hidden_layers=4,
            full_attention_interval=4, layer_types=_layers("lllf"), partial_rotary_factor=0.25,
            decoder_sparse_step=1, shared_expert_intermediate_size=128, mlp_only_layers=[],
            **_EXPERTS, **_LINEAR,
        ), tree=1, dtype="bfloat16", ci=("vllm",),
    ),
    "qwen3.5": Architecture(
        "Qwen3.5",
        _config(
            "Qwen3_5ForCausalLM", "qwen3_5_text", (24, 4, 256), num_hidden_layers=4,
            full_attention_interval=4, layer_types=_layers("lllf"),
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                             "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
                             "mrope_interleaved": True},
            **_LINEAR,
        ),
        # vLLM's CPU package lacks torchvision, which the model's module imports.
        tree=1, dtype="bfloat16", cpu=(),
    ),
    "qwen3-moe": Architecture(
        "Qwen3-MoE",
        _config(
            "Qwen3MoeForCausalLM", "qwen3_moe", (8, 1, 128), decoder_sparse_step=1,
            mlp_only_layers=[], **_EXPERTS,
        ), tree=2, cpu=("vllm", "sglang"), ci=("vllm",),
    ),
    "llama": Architecture(
        "Llama",
        _config("LlamaForCausalLM", "llama", (8, 2, 128)), tree=2, cpu=("vllm", "sglang"),
    ),
    "qwen3": Architecture(
        "Qwen3",
        _config("Qwen3ForCausalLM", "qwen3", (10, 2, 128)), tree=2, cpu=("vllm", "sglang"),
    ),
    "qwen2.5": Architecture(
        "Qwen2.5",
        _config("Qwen2ForCausalLM", "qwen2", (14, 2, 64), hidden_size=14 * 64,
                use_sliding_window=False),
        tree=2, cpu=("vllm", "sglang"),
    ),
    "glm-4": Architecture(
        "GLM-4",
        _config("Glm4ForCausalLM", "glm4", (16, 1, 128), partial_rotary_factor=0.5,
                attention_bias=True),
        tree=2, cpu=("vllm", "sglang"),
    ),
    "glm-4.5": Architecture(
        "GLM-4.5",
        _config(
            "Glm4MoeForCausalLM", "glm4_moe", (12, 1, 128), partial_rotary_factor=0.5,
            n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1,
            topk_group=1, moe_intermediate_size=128, norm_topk_prob=True, use_qk_norm=True,
            first_k_dense_replace=1, routed_scaling_factor=1.0, attention_bias=True,
        ), tree=2,
    ),
    "minimax-m2": Architecture(
        "MiniMax-M2",
        _config(
            "MiniMaxM2ForCausalLM", "minimax_m2", (12, 2, 128), rotary_dim=64,
            num_local_experts=4, num_experts_per_tok=2, intermediate_size=128,
            use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True,
            scoring_func="sigmoid", attn_type_list=[1, 1], shared_intermediate_size=0,
        ), tree=2,
    ),
    "hunyuan": Architecture(
        "Hunyuan",
        _config("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", (8, 2, 128),
                hidden_size=8 * 128, use_qk_norm=True, attention_bias=False, mlp_bias=False,
                rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32,
                              "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0}),
        tree=2,
    ),
    "mistral": Architecture(
        "Mistral",
        _config("MistralForCausalLM", "mistral", (8, 2, 128), sliding_window=None),
        tree=2, cpu=("vllm", "sglang"),
    ),
    "phi-4": Architecture(
        "Phi-4",
        _config("Phi3ForCausalLM", "phi3", (8, 2, 128), rope_scaling=None, sliding_window=None,
                original_max_position_embeddings=8192, pad_token_id=0),
        tree=2,
    ),
    "mimo": Architecture(
        "MiMo",
        _config("MiMoForCausalLM", "mimo", (8, 2, 128), attention_bias=True,
                num_nextn_predict_layers=0),
        tree=2,
    ),
    "gemma4": Architecture(
        "Gemma 4",
        _config(
            "Gemma4ForCausalLM", "gemma4_text", (8, 2, 256), num_hidden_layers=3,
            global_head_dim=512, num_global_key_value_heads=2, layer_types=_layers("ssf"),
            sliding_window=WINDOW, hidden_activation="gelu_pytorch_tanh",
            hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCABULARY,
            num_kv_shared_layers=0, attention_k_eq_v=False, enable_moe_block=False,
            use_double_wide_mlp=False,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0,
                                   "partial_rotary_factor": 0.25},
            },
        ), tree=0,
    ),
    "mimo-v2": Architecture(
        "MiMo-V2",
        _config(
            "MiMoV2FlashForCausalLM", "mimo_v2_flash", (8, 1, 192), v_head_dim=128,
            num_hidden_layers=2, hybrid_layer_pattern=[0, 1], swa_num_attention_heads=8,
            swa_num_key_value_heads=2, swa_head_dim=192, swa_v_head_dim=128,
            sliding_window=WINDOW, sliding_window_size=WINDOW, swa_rope_theta=10000.0,
            partial_rotary_factor=0.334, add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False, attention_bias=False,
            attention_value_scale=0.707, moe_layer_freq=[0, 0], layernorm_epsilon=1e-6,
            n_routed_experts=4, n_shared_experts=None, num_experts_per_tok=2,
            moe_intermediate_size=128, n_group=1, topk_group=1, norm_topk_prob=True,
            scoring_func="sigmoid", topk_method="noaux_tc", routed_scaling_factor=1.0,
        ), tree=0, cpu=(),
    ),
}  # fmt: skip
"""By name, the most telling first: a run that is cut short has these."""
