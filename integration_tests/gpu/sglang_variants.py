"""SGLang's servers on GPUs."""

from collections.abc import Mapping

from integration_tests.gpu.variants import PAPERS, Fleet, Variant

COMMON = (
    "--sampling-backend", "pytorch",
    "--cuda-graph-backend-prefill=disabled", "--cuda-graph-bs-decode", "1", "8", "32", "64",
    # Each server gets a share of the GPU, although it measures free memory while others start.
    "--mem-fraction-static", "0.5", "--max-total-tokens", "100000",
)  # fmt: skip

REFERENCES: Mapping[str, Variant] = {
    "host": Variant("fa3"),
    "host-float16": Variant("fa3", ("--dtype", "float16")),
    "host-lora": Variant("fa3", lora=True),
}

VARIANTS: Mapping[str, Variant] = {
    "default": Variant("deft"),
    **{f"policy-{name}": Variant("deft", settings={"DEFT_POLICY": name}) for name in PAPERS},
    "float16": Variant("deft", ("--dtype", "float16"), against="host-float16"),
    "pages-of-16": Variant("deft", ("--page-size", "16", "--chunked-prefill-size", "512")),
    "lora": Variant("deft", against="host-lora", lora=True),
    "memory-saver": Variant("deft", ("--enable-memory-saver",)),
    "hierarchical": Variant("deft", ("--enable-hierarchical-cache", "--hicache-ratio", "2")),
    "two-ranks": Variant(
        "deft", ("--tensor-parallel-size", "2"), {}, "default", 2, states=("tp0", "tp1")
    ),
    "two-stages": Variant(
        "deft",
        ("--pipeline-parallel-size", "2"),
        {},
        "default",
        2,
        states=("tp0-pp0", "tp0-pp1"),
        in_step=False,
    ),
    "data-parallel": Variant(
        "deft",
        ("--tensor-parallel-size", "2", "--data-parallel-size", "2", "--enable-dp-attention"),
        {},
        "default",
        2,
        states=("tp0-dp0", "tp1-dp1"),
        in_step=False,
    ),
}

FLEET = Fleet("sglang", COMMON, REFERENCES, VARIANTS)
