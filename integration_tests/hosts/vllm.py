"""Real vLLM servers on the CPU."""

import json

from deft_backend.hosts.vllm.versions import backend_name
from integration_tests.common import server
from integration_tests.common.plugins import CPU_BACKEND

_CHUNKS = "--block-size 16 --max-model-len 512 --max-num-batched-tokens"
_LARGE = "--block-size 32 --max-model-len 2048 --max-num-batched-tokens 512"
_DRAFT = json.dumps({"model": str(server.DRAFT), "num_speculative_tokens": 4})
_LOOKUP = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
_SHORT_LINES = {"VLLM_LOG_STATS_INTERVAL": "1"}

GROUPS = {
    # Prefix caching is on, which is vLLM's default.
    "default": server.Group(_LARGE, _SHORT_LINES, lora=True),
    # Prefill in chunks, no prefix cache, and fewer pages than the requests need; another memory
    # order of the cache: blocks before layers, where the version has it.
    "pressed": server.Group(
        "--block-size 32 --max-model-len 512 --no-enable-prefix-caching "
        "--max-num-batched-tokens 64 --num-gpu-blocks-override 20",
        {**server.EAGER, "VLLM_KV_CACHE_LAYOUT": "BLHNC" if backend_name() == "DEFT" else "HND"},
    ),
    # Prompts in chunks behind cached prefixes, so that most steps with prefills also decode. The
    # first cache has few blocks.
    "chunks-of-16": server.Group(
        f"{_CHUNKS} 64 --long-prefill-token-threshold 16 --num-gpu-blocks-override 40",
        {**server.EAGER, **_SHORT_LINES},
    ),
    "lookup": server.Group(
        f"{_CHUNKS} 64 --speculative-config '{_LOOKUP}'", {**server.EAGER, **_SHORT_LINES}
    ),
    # Chunks end where the batch leaves room, so some prompts end by a chunk of one token.
    "invariant": server.Group(
        f"{_CHUNKS} 33 --long-prefill-token-threshold 16", {"VLLM_BATCH_INVARIANT": "1"}
    ),
    "draft": server.Group(
        f"{_LARGE} --speculative-config '{_DRAFT}'", {**server.EAGER, **_SHORT_LINES}
    ),
    # Fewer blocks than the documents of a test need. The host prefills in pieces, and reports each
    # eviction.
    "small-cache": server.Group(
        "--block-size 32 --max-model-len 1024 --max-num-batched-tokens 128 "
        "--num-gpu-blocks-override 40 --kv-cache-metrics --kv-cache-metrics-sample 1",
        server.EAGER,
    ),
    "fp8": server.Group("--block-size 32 --max-model-len 1024 --kv-cache-dtype fp8", server.EAGER),
    **{
        group: server.Group(
            "--block-size 32 --max-model-len 1024",
            {**server.EAGER, "DEFT_POLICY": group.removeprefix("policy-")},
        )
        for group in server.POLICY_GROUPS
    },
    "two-ranks": server.Group(
        "--block-size 128 --max-model-len 1024 --tensor-parallel-size 2",
        {**server.EAGER, "VLLM_CPU_OMP_THREADS_BIND": server.cores_of_two_ranks()},
    ),
}


WATCHED = server.Group(_LARGE)
WITHOUT_PLUGINS = {"VLLM_PLUGINS": ""}


class HostServer(server.Server):
    PAUSES = ("wait", "keep")

    def settings(self):
        """The host tells nothing about itself."""
        return {}

    def pause(self, mode):
        assert server.ask_to(self, f"pause?mode={mode}") == 200

    def resume(self):
        assert server.ask_to(self, "resume") == 200

    def flush(self):
        """Whether the host flushed its prefix cache, which needs an idle server."""
        return bool(self.post("reset_prefix_cache", {})["success"])

    def flush_while_decoding(self):
        """The host preempts every request, flushes, and computes all of them again."""
        assert server.ask_to(self, "reset_prefix_cache?reset_running_requests=true") == 200

    def abort_all(self):
        assert server.ask_to(self, "abort_requests") == 200

    def load_weights(self, folder):
        self.pause("wait")
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        assert server.ask_to(self, "collective_rpc", call) == 200
        assert server.ask_to(self, "reset_prefix_cache") == 200
        self.resume()

    def counted(self, *names):
        """The sums of the host's own counters of these names."""
        return tuple(sum(self.metrics(f"vllm:{name}").values()) for name in names)

    def evicted(self):
        """Blocks that the host evicted from its prefix cache."""
        return self.counted("kv_block_lifetime_seconds_count")[0]

    def taken_back(self):
        """Requests that the host took back while they decoded."""
        assert self.metrics("vllm:num_preemptions_total"), "the host has no such counter"
        return self.counted("num_preemptions_total")[0]

    def drafts(self, prompt):
        """Verifications and accepted drafts of a request alone, by the host's own count."""
        names = ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
        before = self.counted(*names)
        self.complete([server.Ask(prompt, tokens=24)])
        return tuple(after - b for after, b in zip(self.counted(*names), before, strict=True))


def asked_of(group, folder, adapter):
    """Plugins, settings and flags of a server of this group."""
    lora = f"--enable-lora --max-loras 1 --max-lora-rank 8 --lora-modules adapted={adapter}"
    flags = f"--max-num-seqs 32 {lora if group.lora else ''}"
    return [CPU_BACKEND], {"VLLM_SERVER_DEV_MODE": "1"}, flags
