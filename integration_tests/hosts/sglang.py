"""Real SGLang servers on the CPU engine."""

import json
import re
import time

from integration_tests.common import server
from integration_tests.hosts.cpu_speculation import REGISTER

# If the host finds NCCL, its group of two ranks needs a GPU.
_TWO_PROCESSES = {
    **server.EAGER,
    "SGLANG_CPU_OMP_THREADS_BIND": server.cores_of_two_ranks(),
    "SGLANG_NCCL_SO_PATH": "/nowhere/libnccl.so",
}

# The host's flags for pages and chunks, and for as many drafts in chains, in trees and of n-grams.
_PAGES = "--page-size 16 --chunked-prefill-size 128"
_DRAFTING = f"--speculative-algorithm STANDALONE --speculative-draft-model-path {server.DRAFT} "
_DRAFTING += "--speculative-num-steps 3"
_CHAINS = f"{_DRAFTING} --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
_TREES = f"{_DRAFTING} --speculative-eagle-topk 2 --speculative-num-draft-tokens 6"
_LOOKUP = "--speculative-algorithm NGRAM --speculative-num-draft-tokens 6"

GROUPS = {
    "default": server.Group("--enable-streaming-session"),
    "no-overlap": server.Group(
        "--disable-overlap-schedule --enable-metrics --decode-log-interval 4", cli=True
    ),
    "no-radix": server.Group("--disable-radix-cache", server.EAGER),
    # Fewer pages than the documents of a test need, and the core of the unified tree in Python.
    "small-cache": server.Group(
        f"--max-total-tokens 1280 {_PAGES} --enable-cache-report --enable-metrics",
        {**server.EAGER, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"},
    ),
    # The host's own switch for its tests: every few steps it retracts decoding requests.
    "retracting": server.Group(
        _PAGES, {**server.EAGER, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "6"}
    ),
    "mixed": server.Group("--enable-mixed-chunk --chunked-prefill-size 32", server.EAGER),
    "mixed-ranks": server.Group(
        "--enable-mixed-chunk --chunked-prefill-size 64 --tensor-parallel-size 2", _TWO_PROCESSES
    ),
    "two-ranks": server.Group("--tensor-parallel-size 2", _TWO_PROCESSES),
    "stages": server.Group("--pipeline-parallel-size 2", _TWO_PROCESSES),
    "engines": server.Group("--data-parallel-size 2", _TWO_PROCESSES),
    **{
        group: server.Group(settings={**server.EAGER, "DEFT_POLICY": group.removeprefix("policy-")})
        for group in server.POLICY_GROUPS
    },
    "chain": server.Group(_CHAINS, server.EAGER, cpu_speculation=True),
    "tree": server.Group(_TREES, server.EAGER, cpu_speculation=True),
    "lookup": server.Group(_LOOKUP, server.EAGER, cpu_speculation=True),
    "chain-pages": server.Group(f"{_CHAINS} {_PAGES}", server.EAGER, cpu_speculation=True),
}


WATCHED = server.Group("--enable-metrics")
WITHOUT_PLUGINS = {"SGLANG_PLUGINS": "none"}
_OF_A_RUN = (
    *("port", "nccl_port", "random_seed"),
    *("internal_states", "launch_command", "startup_time"),
)


class HostServer(server.Server):
    PAUSES = ("in_place", "retract")

    def settings(self):
        """What the host decided about itself."""
        with self.open("server_info") as response:
            found = json.load(response)
        return {name: value for name, value in found.items() if name not in _OF_A_RUN}

    def pause(self, mode):
        assert server.ask_to(self, "pause_generation", {"mode": mode}) == 200

    def resume(self):
        assert server.ask_to(self, "continue_generation") == 200

    def flush(self):
        """Whether the host flushed its prefix cache: it refuses while requests run or wait."""
        return server.ask_to(self, "flush_cache") == 200

    flush_while_decoding = flush

    def abort_all(self):
        assert server.ask_to(self, "abort_request", {"abort_all": True}) == 200

    def load_weights(self, folder):
        self.pause("retract")
        time.sleep(1)  # the host wants to be idle
        assert server.ask_to(self, "update_weights_from_disk", {"model_path": str(folder)}) == 200
        self.resume()

    def evicted(self):
        """Tokens that the host evicted from its prefix cache."""
        return sum(self.metrics("sglang:evicted_tokens_total").values())

    def taken_back(self):
        """Requests that the host took back while they decoded."""
        return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", self.log)))

    def drafts(self, prompt):
        """Verifications and accepted drafts of a request alone, by the host's own count."""
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        found = self.post("generate", {"text": prompt, "sampling_params": sampling})["meta_info"]
        return found["spec_verify_ct"], found["spec_num_correct_drafts"]


def asked_of(group, folder, adapter):
    """Plugins, settings and flags of a server of this group."""
    plugins = [REGISTER] if group.cpu_speculation else []
    # Servers that start side by side would load what the other one has half written.
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor")}
    # Without `--sleep-on-idle` the host's scheduler polls: the baseline would take a core.
    return plugins, settings, "--max-running-requests 32 --sleep-on-idle"
