"""Servers on GPUs with different dtypes, pages, ranks and modes, all started at once."""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

from benchmarks.e2e.pair import ServerPair, sglang_pair
from benchmarks.e2e.served_model import write_model
from deft_backend.files.folders import state_directory
from deft_backend.settings.config import Settings
from deft_backend.settings.policy_names import AUTO, FLASH_DECODING, INVARIANT, POLICY_NAMES
from deft_backend.tools.servers.command import LOOPBACK, StartError, free_port, server_command
from deft_backend.tools.servers.process import ServerProcess
from integration_tests.common.plugins import ANY_SHARING, plugin_settings
from integration_tests.common.server import START_SECONDS, Server

LATENT_SERVERS = (("latent-32", 1), ("latent-16", 1), ("latent-8", 1), ("latent-16", 2))
"""Shapes and ranks of servers with MLA: the heads of DeepSeek-V2-Lite or of a rank of V3, and
twice those of a rank of Kimi K2."""

PAPERS = [n for n in POLICY_NAMES if n not in (FLASH_DECODING, AUTO, INVARIANT)]
"""The papers' policies, each in a server of its own."""

ADAPTERS = ("adapted", "adapted-2")
"""Names of the adapters on servers with LoRA, and of their folders."""

_LORA = {
    "sglang": ("--max-loras-per-batch", "3", "--lora-paths"),  # the base counts
    "vllm": ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"),
}


@dataclass(frozen=True)
class Variant:
    backend: str  # ``deft``, or the host's own backend for the reference answers
    flags: str = ""  # as on a command line
    settings: Mapping[str, str] = field(default_factory=dict)
    against: str = "host"  # the variant that checks its answers
    ranks: int = 1  # one GPU each
    disaggregated: bool = False  # a prefill and a decode server
    lora: bool = False  # also serves the adapters
    drafts: bool = False  # another model drafts blocks of tokens
    any_sharing: bool = False  # takes what is shared, whatever the costs say
    states: tuple[str, ...] = ("tp0",)  # names of its ranks' state files, behind the port
    in_step: bool = True  # its ranks decode the same batches


@dataclass(frozen=True)
class Fleet:
    host: str
    common: str  # flags of every server
    references: Mapping[str, Variant]  # with the host's own backend, by name
    variants: Mapping[str, Variant]  # with tree attention, by name

    @property
    def servers(self):
        return {**self.references, **self.variants}


_TWO = {"against": "default", "ranks": 2}
_APART = {**_TWO, "in_step": False}
_PAIR = {"ranks": 2, "disaggregated": True}
_POLICIES = {f"policy-{name}": Variant("deft", settings={"DEFT_POLICY": name}) for name in PAPERS}

_MIXED = "--enable-mixed-chunk --chunked-prefill-size 256"

_DFLASH = "--speculative-algorithm DFLASH --max-running-requests 64"

# Each server gets a share of the GPU, although it measures free memory while others start.

_SGLANG = Fleet(
    "sglang",
    "--sampling-backend pytorch --cuda-graph-backend-prefill=disabled "
    "--cuda-graph-bs-decode 1 8 32 64 --mem-fraction-static 0.5 --max-total-tokens 100000",
    {
        "host": Variant("fa3"),
        "host-float16": Variant("fa3", "--dtype float16"),
        "host-lora": Variant("fa3", lora=True),
        "host-dflash": Variant("fa3", _DFLASH, drafts=True),
        # Tells what the host's transfer changes from what tree attention does.
        "host-disaggregated": Variant("fa3", **_PAIR),
    },
    {
        "default": Variant("deft"),
        **_POLICIES,
        "disaggregated": Variant("deft", **_PAIR),
        "float16": Variant("deft", "--dtype float16", against="host-float16"),
        "pages-of-16": Variant("deft", "--page-size 16 --chunked-prefill-size 512"),
        "mixed": Variant("deft", _MIXED, any_sharing=True),
        "mixed-in-graphs": Variant(
            "deft",
            f"{_MIXED} --page-size 16 --cuda-graph-backend-prefill=breakable",
            any_sharing=True,
        ),
        "lora": Variant("deft", against="host-lora", lora=True),
        "dflash": Variant("deft", _DFLASH, drafts=True),
        "memory-saver": Variant("deft", "--enable-memory-saver"),
        "hierarchical": Variant("deft", "--enable-hierarchical-cache --hicache-ratio 2"),
        "two-ranks": Variant("deft", "--tp-size 2", **_TWO, states=("tp0", "tp1")),
        "two-stages": Variant("deft", "--pp-size 2", **_APART, states=("tp0-pp0", "tp0-pp1")),
        "data-parallel": Variant(
            "deft",
            "--tp-size 2 --dp-size 2 --enable-dp-attention",
            **_APART,
            states=("tp0-dp0", "tp1-dp1"),
        ),
    },
)

_CHUNKS = "--max-num-batched-tokens 512"
_SHORT_CHUNKS = f"{_CHUNKS} --long-prefill-token-threshold 64 --max-num-seqs 256"

_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}

_DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Without it, vLLM has no endpoints that let a server sleep or change its weights."""

_VLLM = Fleet(
    "vllm",
    "--gpu-memory-utilization 0.1 --kv-cache-memory-bytes 2000000000 --max-model-len 16384",
    {
        "host": Variant("FLASH_ATTN"),
        "host-lora": Variant("FLASH_ATTN", lora=True),
        "host-invariant": Variant("FLASH_ATTN", settings=_INVARIANT),
        "host-sleeping": Variant("FLASH_ATTN", "--enable-sleep-mode", _DEVELOPMENT),
        "host-disaggregated": Variant("FLASH_ATTN", **_PAIR),
    },
    {
        "default": Variant("deft"),
        **_POLICIES,
        "disaggregated": Variant("deft", **_PAIR),
        # Prompts come in chunks, so that most steps with prefills also decode.
        "chunks": Variant("deft", _SHORT_CHUNKS, any_sharing=True),
        "chunks-lookup": Variant(
            "deft",
            f"{_CHUNKS} --speculative-config "
            """'{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'""",
            any_sharing=True,
        ),
        "batch-invariant": Variant("deft", _SHORT_CHUNKS, _INVARIANT, "host-invariant"),
        "lora": Variant("deft", against="host-lora", lora=True),
        "sleeping": Variant("deft", "--enable-sleep-mode", _DEVELOPMENT, "host-sleeping"),
        # For machines whose GPUs may not use NVLink multicast: vLLM's own all-reduces may use it.
        "two-ranks": Variant(
            "deft",
            "--tensor-parallel-size 2 --disable-custom-all-reduce --compilation-config "
            """'{"pass_config": {"fuse_allreduce_rms": false}}'""",
            {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"},
            **_TWO,
            states=("tp0", "tp1"),
        ),
        "two-stages": Variant(
            "deft", "--pipeline-parallel-size 2", **_APART, states=("tp0-pp0", "tp0-pp1")
        ),
        "two-engines": Variant(
            "deft", "--data-parallel-size 2", **_APART, states=("tp0", "tp0-dp1")
        ),
    },
)

FLEET = _VLLM if find_spec("sglang") is None else _SGLANG
"""The servers of the host that is installed here."""


@contextmanager
def running(fleet, names, gpus, model, adapters, folder):
    """Servers of these names, or the reason why one did not start, for a `with` block.

    They share this number of GPUs; each rank of a server gets one of its own.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = given.split(",")[:gpus] if given else [str(index) for index in range(gpus)]
    with ExitStack() as stack, ThreadPoolExecutor(len(names)) as threads:

        def start(at, name):
            variant = fleet.servers[name]
            places = range(at * variant.ranks, (at + 1) * variant.ranks)
            shown = ",".join(visible[place % gpus] for place in places)
            try:
                return _start(fleet, name, shown, model, adapters, folder, stack)
            except StartError as error:
                return error

        yield dict(zip(names, threads.map(start, range(len(names)), names), strict=True))


def _start(fleet, name, gpus, model, adapters, folder, stack):
    variant = fleet.servers[name]
    flags = shlex.split(f"{fleet.common} {variant.flags}")
    if variant.lora:
        flags += [*_LORA[fleet.host], *(f"{name}={adapters / name}" for name in ADAPTERS)]
    if variant.drafts:
        drafter = write_model(folder / name, "four-layers-drafting", "random", "bfloat16")
        flags += ["--speculative-draft-model-path", drafter.path]
    asked = plugin_settings(folder / name / "plugins", ANY_SHARING) if variant.any_sharing else {}
    command = server_command(
        model.path,
        free_port(),
        host=fleet.host,
        backend=variant.backend,
        host_arguments=flags,
        gpu=True,
        environment={"CUDA_VISIBLE_DEVICES": gpus, **asked, **variant.settings},
    )
    log = folder / name / "server.log"
    pair = {"sglang": sglang_pair, "vllm": _vllm_pair}[fleet.host]
    process = (
        ServerPair(pair(command), log, timeout=START_SECONDS)
        if variant.disaggregated
        else ServerProcess(command, log, timeout=START_SECONDS)
    )
    stack.enter_context(process)
    return Server(process, state_directory(Settings.from_env()))


_VLLM_ROUTER = """
import toy_proxy_server as proxy
import uvicorn
from fastapi.responses import RedirectResponse

given = proxy.global_args = proxy.parse_args()
models = f"http://127.0.0.1:{given.decoder_ports[0]}/v1/models"
proxy.app.get("/v1/models")(lambda: RedirectResponse(models))
uvicorn.run(proxy.app, host=given.host, port=given.port)
"""
"""The proxy of vLLM's own tests (tests/v1/kv_connector/nixl_integration), on the Python path."""


def _vllm_pair(command):
    """Two servers that transfer KV by NixlConnector, each on one of the command's GPUs."""
    port, place = free_port(), free_port()
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    arguments = (*command.arguments, "--kv-transfer-config", transfer)
    gpus = command.environment["CUDA_VISIBLE_DEVICES"].split(",")
    decode, prefill = (
        replace(
            command,
            arguments=(*arguments, "--port", str(at)),
            port=at,
            environment={
                **command.environment,
                "CUDA_VISIBLE_DEVICES": gpu,
                "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            },
        )
        for at, gpu in ((command.port, gpus[-1]), (port, gpus[0]))
    )
    router = [sys.executable, "-c", _VLLM_ROUTER, "--port", str(place)]
    router += ["--prefiller-hosts", LOOPBACK, "--prefiller-ports", str(port)]
    router += ["--decoder-hosts", LOOPBACK, "--decoder-ports", str(command.port)]
    return decode, prefill, replace(command, arguments=tuple(router), port=place)
