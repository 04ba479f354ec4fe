"""vLLM's servers on GPUs."""

from collections.abc import Mapping

from integration_tests.gpu.variants import PAPERS, Fleet, Variant

COMMON = (
    # Each server gets a share of the GPU, although it measures free memory while others start.
    "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "2000000000",
    "--max-model-len", "16384",
)  # fmt: skip

DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Without it, vLLM has no endpoints that let a server sleep or change its weights."""

NO_MULTICAST = (
    "--disable-custom-all-reduce",
    "--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}',
)  # fmt: skip
"""For machines whose GPUs may not use NVLink multicast: vLLM's own all-reduces may use it."""

REFERENCES: Mapping[str, Variant] = {
    "host": Variant("FLASH_ATTN"),
    "host-lora": Variant("FLASH_ATTN", lora=True),
    "host-sleeping": Variant("FLASH_ATTN", ("--enable-sleep-mode",), DEVELOPMENT),
}

VARIANTS: Mapping[str, Variant] = {
    "default": Variant("deft"),
    **{
        f"policy-{name}": Variant("deft", settings={"DEFT_POLICY": name})
        for name in PAPERS
    },
    # Prompts come in chunks, so that most steps with prefills also decode.
    "chunks": Variant(
        "deft", ("--max-num-batched-tokens", "512", "--long-prefill-token-threshold", "64")
    ),
    "chunks-lookup": Variant(
        "deft",
        (
            "--max-num-batched-tokens", "512", "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}',
        ),
    ),
    "lora": Variant("deft", against="host-lora", lora=True),
    "sleeping": Variant("deft", ("--enable-sleep-mode",), DEVELOPMENT, "host-sleeping"),
    "two-ranks": Variant(
        "deft", ("--tensor-parallel-size", "2", *NO_MULTICAST),
        {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}, "default", 2, states=("tp0", "tp1"),
    ),
    "two-stages": Variant(
        "deft", ("--pipeline-parallel-size", "2"), {}, "default", 2,
        states=("tp0-pp0", "tp0-pp1"), in_step=False,
    ),
    "two-engines": Variant(
        "deft", ("--data-parallel-size", "2"), {}, "default", 2,
        states=("tp0", "tp0-dp1"), in_step=False,
    ),
}  # fmt: skip

FLEET = Fleet("vllm", COMMON, REFERENCES, VARIANTS)
