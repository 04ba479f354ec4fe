"""The backend of a model runner: what is refused, and what a failed set-up leaves behind."""

import logging
from ast import literal_eval
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sglang_fakes as fakes
from attention_checks import latent_attention, tree_attention
from deft_backend.hosts.common.limits import Division, LayerShape
from deft_backend.hosts.sglang import factory, report
from deft_backend.hosts.sglang import layers as model_layers
from deft_backend.hosts.sglang.latent import LatentLayers
from deft_backend.hosts.sglang.steps import TreeSteps
from deft_backend.settings.config import Settings
from drawings import check_asked

FOUR_HEADS = Division(dict.fromkeys((0, 1), LayerShape(4, 2, 64)), {})
"""Both layers of a model decode through tree attention."""


def test_the_draft_models_runner_keeps_the_hosts_backend(host):
    own = object()
    assert factory.wrap_backend(SimpleNamespace(is_draft_worker=True), "fa3", own) is own


@pytest.mark.parametrize(
    ("name", "cache", "scale", "refused"),
    [
        ("torch_native", torch.float8_e4m3fn, 0.02, True),
        ("flex_attention", torch.float8_e5m2, 0.02, True),
        ("torch_native", torch.float8_e4m3fn, None, False),
        ("torch_native", torch.bfloat16, 0.02, False),
        ("triton", torch.float8_e4m3fn, 0.02, False),
    ],
)
@pytest.mark.parametrize("scaled", ["k_scale", "v_scale"])
def test_a_backend_that_ignores_the_scales_of_8_bits_decodes_itself(
    host, name, cache, scale, refused, scaled, monkeypatch
):
    """SGLang's torch backends write and read such a cache without its scales."""
    unscaled = {"k_scale": None, "v_scale": None}
    layers = [SimpleNamespace(**unscaled), SimpleNamespace(**{**unscaled, scaled: scale})]
    monkeypatch.setattr(model_layers, "attention_layers", lambda model: layers)
    reason = model_layers.ignored_scales(SimpleNamespace(kv_cache_dtype=cache, model=None), name)
    said = f"{name} ignores the scales of a KV cache in {cache}"
    assert reason == (said if refused else None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"token_to_kv_pool": fakes.SWAKVPool([], [0])}, "without full-attention layers"),
        ({"kv_cache_dtype": torch.bfloat16}, "KV in torch.bfloat16 under a model in torch.float32"),
        ({"dtype": torch.bfloat16, "kv_cache_dtype": torch.bfloat16}, "KV in torch.bfloat16"),
    ],
)
def test_model_runners_that_are_not_supported(changes, reason):
    found = model_layers.unsupported_model(fakes.model_runner(**changes))
    assert found is None if reason is None else reason in str(found)


def test_models_that_call_their_backend_are_found(host, monkeypatch):
    """By the source of their modules, because the call may import its function locally."""
    part = type("Attention", (torch.nn.Module,), {"__module__": "made_up.asking"})
    heir = type("Attention", (part,), {"__module__": "made_up.inheriting"})
    texts = {"made_up.asking": "x = get_attn_backend()", "made_up.inheriting": ""}
    monkeypatch.setattr(model_layers, "_source", texts.__getitem__)
    for model in (part(), heir()):
        assert model_layers.model_asks(SimpleNamespace(model=model))
    texts["made_up.asking"] = "x = attention(q, k, v)"
    for model in (part(), heir(), torch.nn.Linear(1, 1)):
        assert not model_layers.model_asks(SimpleNamespace(model=model))
    layer = type("RadixAttention", (torch.nn.Module,), {"__module__": "sglang.srt.layers.x"})
    assert not model_layers.model_asks(SimpleNamespace(model=layer()))
    monkeypatch.undo()
    assert "get_attn_backend" in model_layers._source("sys")  # built in: it may ask
    assert "SimpleNamespace" in model_layers._source(__name__)


GROUP = "in host memory"


@pytest.fixture(autouse=True)
def ranks(monkeypatch):
    monkeypatch.setattr(model_layers, "attention_ranks", lambda: 2)


def own_backend(runner):
    pools = {name: getattr(runner, name) for name in ("token_to_kv_pool", "req_to_token_pool")}
    return type("OwnBackend", (), pools)()


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("nowhere", "deft: decode goes through tree attention (policy auto, workspace"),
        ("set-up", "deft: tree attention could not be set up (RuntimeError('not here')); all"),
        ("another rank", "deft: another rank has no tree attention; all attention runs"),
        ("no group", "deft: its ranks cannot agree on tree attention (AttributeError("),
        ("differs", "deft: its ranks would decode in different ways (DEFT_POLICY, DEFT_MIN_BATCH"),
    ],
)
def test_a_set_up_that_fails_leaves_nothing_behind(
    host, at, said, monkeypatch, caplog, tmp_path, failures
):
    """The host's backend then runs alone on all ranks, with one set of graphs."""

    def reduced(flags, operation, group):
        assert (operation, group) == (torch.distributed.ReduceOp.MIN, GROUP)
        other = flags.clone()
        if at == "another rank":
            other = torch.tensor([0, *other[1:]])
        elif at == "differs":  # the other rank decided something else
            other = torch.tensor([1, other[1] + 5, -(other[1] + 5)])
        flags.copy_(torch.minimum(flags, other))

    def steps(runner, layers, settings, undo):
        undo.callback(undone.append, layers)
        if at == "set-up":
            raise RuntimeError("not here")
        return TreeSteps(layers, settings)

    caplog.set_level("INFO", logger="deft_backend")
    monkeypatch.setenv("DEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.distributed, "all_reduce", reduced)
    monkeypatch.setattr(factory, "_steps", steps)
    group = SimpleNamespace(world_size=2, **({} if at == "no group" else {"cpu_group": GROUP}))
    runner, undone, works = fakes.model_runner(tp_group=group), [], at == "nowhere"
    own = own_backend(runner)
    made = factory.wrap_backend(runner, "triton", own)
    assert [line for line in caplog.messages if line.startswith(said)]
    assert bool(failures) == (at == "set-up")
    failures.clear()
    assert (made is not own, hasattr(own, "deft"), len(undone)) == (works, works, not works)
    assert len(list(tmp_path.iterdir())) == works  # the mark of tree attention


@pytest.mark.parametrize("rows", [4, 2048, 2049])
def test_deterministic_inference_plans_every_batch_by_policy_invariant(
    host, rows, monkeypatch, caplog, tmp_path
):
    """The host's kernel would give a batch that no plan holds other bits."""
    caplog.set_level("INFO", logger="deft_backend")
    monkeypatch.setenv("DEFT_CACHE_DIR", str(tmp_path))
    runner = fakes.model_runner("disabled", rows, tp_group=SimpleNamespace(world_size=1))
    own = own_backend(runner)
    runner.server_args.enable_deterministic_inference = True
    monkeypatch.setenv("DEFT_LOG", "debug")
    made = factory.wrap_backend(runner, "fa3", own)
    assert factory.logger.level == logging.DEBUG
    if rows > 2048:
        assert made is own
        assert "give --max-running-requests 2048" in caplog.text
        return
    settings, attention = made.deft.settings, made.deft.layers.attention
    assert factory._decided(made.deft, settings) == (True, rows, str(attention.policy), 1, (0, 1))
    assert settings.policy == attention.policy.name == "invariant"
    assert attention.policy.num_chunks(6400) * rows <= attention.capacity.max_entries
    assert "policy invariant, chunks of 512 tokens up to " in caplog.text


@pytest.mark.parametrize("device", [torch.device("cuda", 1), torch.device("cpu")])
def test_what_an_attention_is_made_for(host, device, monkeypatch):
    """A GPU's kernels are compiled and checked before the server decodes."""
    sizes, prepared, settings = [], [], Settings(policy="fasttree", verify=True)

    class Made:
        short_tokens = 512

        def __init__(self, **given):
            self.device = given["device"]
            sizes.append(given)

    monkeypatch.setattr(factory, "TreeAttention", Made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(factory, "_step_tensors", lambda runner, layers: [*layers])
    monkeypatch.setattr(factory, "prepare_kernels", lambda *given: prepared.append(given))
    dtypes = {"dtype": torch.bfloat16, "kv_cache_dtype": torch.float8_e4m3fn}
    runner = fakes.model_runner(device=device.type, gpu_id=1, **dtypes)
    layers = factory._tree_layers(runner, own_backend(runner), settings, 3)
    assert sizes == [
        {
            **{"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 64, "query_tokens": 1},
            **{"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "device": device},
            **{"max_batch": 3, "max_tokens": 6400, "policy": "fasttree"},
        }
    ]
    assert prepared == ([(layers.attention, [0, 1], settings)] if device.type == "cuda" else [])
    assert (layers.division, layers.model_asks, layers._verify) == (FOUR_HEADS, False, True)


def test_what_a_server_gets(host, monkeypatch):
    """By its layers, query tokens of a request, device, and what differs from the usual arguments
    and settings. SGLang 0.5.17 does not ask when page tables were read: its `read_end` is None.
    """
    installed = []

    def install(name):
        return lambda *given: installed.append(name) or (lambda: installed.remove(name))

    monkeypatch.setattr(factory.observe_batch, "install", install("observer"))
    monkeypatch.setattr(factory.page_table_fence, "install", install("fence"))
    monkeypatch.setattr(factory.tree_graphs, "install", install("second graphs"))
    monkeypatch.setattr(factory, "leave_out_warm_up", install("warm-up"))
    monkeypatch.setattr(factory, "_unsplit", lambda *given: "never")

    def answer(attends, tokens, device, *words):
        given = {"read_end": "the forward's", "graphs": "full", "policy": "auto", "verify": False}
        given |= {name: literal_eval(value) for name, value in (word.split("=") for word in words)}
        settings = Settings(policy=given.pop("policy"), verify=given.pop("verify"))
        monkeypatch.setattr(factory.versions, "read_end", lambda: given["read_end"])
        runner = fakes.model_runner(given["graphs"])
        own = own_backend(runner)
        vars(runner.server_args).update(given)
        size = {"max_batch": 4, "query_tokens": int(tokens)}
        if attends == "latent":
            layers = LatentLayers(own, latent_attention(**size), fakes.make_state(), FOUR_HEADS)
        else:
            layers = fakes.tree_layers(own, tree_attention(**size))
        layers.attention.device = torch.device(device)
        with ExitStack() as undo:
            steps = factory._steps(runner, layers, settings, undo)
            names = ("shows", "decodes", "verification", "eager", "mixed", "sharing")
            yield ", ".join([*installed, *(name for name in names if getattr(steps, name))])
        assert steps.eager is None or steps.eager.costs is layers.attention.target.costs
        assert steps.mixed is None or steps.eager in (None, steps.mixed.sharing)
        assert not installed

    check_asked(Path(__file__).with_name("gets.txt"), answer)


@pytest.mark.parametrize(
    ("options", "server", "reason"),
    [
        ({}, {}, None),
        ({"host_layers": {1: "a window"}}, {}, "some layers read the host's metadata of whole"),
        ({"model_asks": True}, {}, "some layers read the host's metadata of whole batches"),
        ({}, {"backend_names": ("fa3", "deft")}, "prefills go to another backend (fa3)"),
        ({}, {"decodes_per_rank": True}, "DP attention pads batches"),
        ({"query_tokens": 2}, {}, "the server verifies drafts"),
        ({"latent": True}, {}, "MLA prefills through other layers"),
    ],
)
def test_why_the_host_computes_steps_that_prefill(
    host, options, server, reason, monkeypatch, caplog
):
    caplog.set_level("INFO", "deft_backend")
    for name, value in {"backend_names": ("fa3",) * 2, "decodes_per_rank": False, **server}.items():
        monkeypatch.setattr(factory.versions, name, lambda arguments, value=value: value)
    own = fakes.recording_backend(host, fakes.MHATokenToKVPool(), np.zeros((2, 2), np.int32))()
    attention = tree_attention(query_tokens=options.pop("query_tokens", 1))
    layers = None if options.pop("latent", False) else fakes.tree_layers(own, attention, **options)
    found = factory._unsplit(SimpleNamespace(server_args=None), layers)
    assert found == reason or (reason is not None and str(found).startswith(reason))
    assert ("in steps that also prefill: " in caplog.text) == (reason is not None)


def test_what_a_server_reports(host, monkeypatch):
    """One rank of each attention group logs; stages and engines have files of their own."""
    told = {}
    monkeypatch.setattr(report, "DecodeLog", lambda steps: f"every {steps} steps")
    monkeypatch.setattr(report, "report_counters", lambda *given, **named: told.update(named))

    def answer(*words):
        runner = fakes.model_runner()
        vars(runner.ps).update(pp_rank=None, dp_rank=None)
        for name, _, value in (word.partition("=") for word in words):
            setattr(runner.ps if "rank" in name else runner.server_args, name, literal_eval(value))
        report.start_reporting(fakes.make_state(), runner, Settings())
        return [str(told)]

    check_asked(Path(__file__).with_name("reports.txt"), answer)


def test_how_a_server_describes_itself(host):
    kind = {"kv_cache_dtype": torch.bfloat16, "device": "cuda"}
    runner = fakes.model_runner(**kind, ps=SimpleNamespace(tp_rank=3))
    given = {"short_tokens": 512, "values_apart": False}
    found = vars(report.state_of(runner, FOUR_HEADS, "fasttree", **given))
    assert (
        found.items()
        >= {
            **{"port": 1, "rank": 3, "host": "sglang", "backend": "deft", "policy": "fasttree"},
            **{"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 64, "num_layers": 2},
            **{"device": "cuda", "dtype": "bfloat16", "dtype_bytes": 2, **given},
            "host_version": report.SGLANG.installed(),
        }.items()
    )
    plain = report.state_of(runner, FOUR_HEADS, "fasttree")
    assert (plain.short_tokens, plain.values_apart) == (0, True)
