"""What differs between the versions of SGLang: each form of an answer, whatever is installed."""

import sys
from ast import literal_eval
from pathlib import Path
from types import SimpleNamespace

import pytest

from deft_backend.hosts.sglang import arguments, plugin, versions
from drawings import check_asked


def decode(kind):
    return SimpleNamespace(decode=SimpleNamespace(backend=kind))


@pytest.fixture
def newer(host, monkeypatch):
    """The modules of newer versions: resolved arguments are a view, and ranks are a context."""
    decided = []
    overrides = SimpleNamespace(
        attention_backends_of=lambda view: ("fa3", f"decode of {view}"),
        use_mla_backend=lambda arguments: f"MLA of {arguments}",
        model_config_of=lambda arguments: f"the model of {arguments}",
        declare_resolution=lambda *given, **named: decided.append((given, named)),
    )
    base = SimpleNamespace(resolved_view=lambda given: getattr(given, "view", f"a view of {given}"))
    ranks = SimpleNamespace(tp_group="their group", attn_tp_size="4")
    modules = {
        "arg_groups": SimpleNamespace(overrides=overrides, model_override_base=base),
        "arg_groups.overrides": overrides,
        "arg_groups.model_override_base": base,
        "runtime_context": SimpleNamespace(get_parallel=lambda: ranks),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
    return SimpleNamespace(decided=decided, ranks=ranks)


def test_functions_answer_where_arguments_have_no_methods(newer):
    assert versions.backend_names("arguments") == ("fa3", "decode of a view of arguments")
    assert versions.uses_mla("arguments") is True
    assert versions.model_config("arguments") == "the model of arguments"
    old = SimpleNamespace(
        get_attention_backends=lambda: ("a", "b"),
        use_mla_backend=lambda: 0,
        get_model_config=lambda: "c",
    )
    assert versions.backend_names(old) == ("a", "b")
    assert versions.uses_mla(old) is False
    assert versions.model_config(old) == "c"


def test_ranks_are_the_model_runners_or_the_contexts(newer):
    assert versions.ranks(SimpleNamespace(ps="its own")) == "its own"
    assert versions.ranks(SimpleNamespace()) is newer.ranks
    assert versions.tensor_parallel_group(SimpleNamespace(tp_group=None)) is None
    assert versions.tensor_parallel_group(SimpleNamespace()) == "their group"
    assert versions.attention_ranks() == 4


@pytest.mark.parametrize("kind", ["full", "disabled"])
def test_decode_graphs_are_switched_off_once(newer, kind):
    """By one more decision: the host may share the object."""
    config = decode(kind)
    arguments = SimpleNamespace(view=SimpleNamespace(cuda_graph_config=config))
    versions.disable_decode_graphs(arguments)
    assert config == decode(kind)
    expected = [((arguments, "deft"), {"cuda_graph_config": decode("disabled")})]
    assert newer.decided == (expected if kind == "full" else [])


@pytest.mark.parametrize("kind", ["full", "disabled"])
def test_versions_without_a_view_of_resolved_arguments(kind, monkeypatch):
    """To 0.5.18 the arguments are what the host decided."""
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.model_override_base", None)
    arguments = SimpleNamespace(cuda_graph_config=decode(kind))
    assert versions.resolved(arguments) is arguments
    assert versions.decode_graphs(arguments) == kind
    versions.disable_decode_graphs(arguments)
    assert versions.decode_graphs(arguments) == "disabled"


def test_what_resolved_arguments_say(newer):
    asked = ("decodes_per_rank", "disaggregation_role", "deterministic", "draft_tokens")

    def answer(*words):
        given = (word.partition("=")[::2] for word in words)
        arguments = SimpleNamespace(**{name: literal_eval(value) for name, value in given})
        resolved = SimpleNamespace(view=arguments)
        more = ["drafts_trees"][: hasattr(arguments, "speculative_algorithm")]
        found = {name: getattr(versions, name)(resolved) for name in (*asked, *more)}
        return [", ".join(f"{name} {said}" for name, said in found.items())]

    check_asked(Path(__file__).with_name("resolved.txt"), answer)


def test_registration_in_order(host, monkeypatch):
    """The hook first: without it, the name would reach code of the host that does not know it."""
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    calls, named = [], ["triton", "deft"]
    monkeypatch.setattr(HookRegistry, "register", lambda *given: calls.append(given))
    monkeypatch.setattr(server_args, "ATTENTION_BACKEND_CHOICES", named)
    monkeypatch.setattr(server_args, "add_attention_backend_choices", calls.append)
    monkeypatch.setattr(plugin, "surround_backends", lambda: calls.append("surrounded"))
    method = "resolve_once" if hasattr(server_args.ServerArgs, "resolve_once") else "__post_init__"
    hook = f"sglang.srt.server_args.ServerArgs.{method}", arguments.resolve, HookType.AROUND
    plugin.register()
    assert calls == [hook, ["DEFT"], "surrounded"]
    with pytest.raises(ValueError, match="made before SGLang loaded its plugins"):
        plugin._unresolved(None)
