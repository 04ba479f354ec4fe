"""Small stand-ins for SGLang: a radix tree, requests, layers, a KV cache, a backend."""

from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch

from deft_backend.attention.reference_attention import reference_attention
from deft_backend.hosts.common.limits import Division, LayerShape
from deft_backend.hosts.sglang.backend import surround
from deft_backend.hosts.sglang.steps import TreeSteps
from deft_backend.hosts.sglang.tree_layers import TreeLayers
from deft_backend.settings.config import Settings
from deft_backend.telemetry.state import ServerState
from deft_backend.tools.servers.driver_stub import SONAME, ensure_driver_stub, has_nvidia_driver

RADIX_CACHE = type("RadixCache", (), {"__module__": "sglang.srt.mem_cache.radix_cache"})()


def assert_same_forest(ours, theirs):
    arrays = "order parent request start length query_begin query_end leaf seq_lens"
    for name in arrays.split():
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name


def mode(name):
    """What a batch does: "decode", "verify", "extend" or "mixed"."""
    return SimpleNamespace(
        name=name,
        is_decode=lambda: name == "decode",
        is_mixed=lambda: name == "mixed",
        is_target_verify=lambda: name == "verify",
        is_idle=lambda: False,
    )


class Node:
    """A node of the host's radix tree, with the attributes that the adapter reads."""

    counter = 0

    def __init__(self, parent, key):
        Node.counter += 1
        self.id = Node.counter
        self.parent = parent
        self.key = key
        self.slots = []
        self.children = {}


class Tree:
    """A radix tree that splits nodes like the host's: the new node goes above the old node."""

    def __init__(self):
        self.root = Node(None, [])
        self.next_slot = 1

    def insert(self, tokens):
        """The node that ends `tokens`, and their slots."""
        node, slots = self.root, []
        while tokens:
            child = node.children.get(tokens[0])
            if child is None:
                child = Node(node, tokens)
                child.slots = self.take(len(tokens))
                node.children[tokens[0]] = child
                return child, slots + child.slots
            shared = 0
            while shared < min(len(child.key), len(tokens)) and child.key[shared] == tokens[shared]:
                shared += 1
            if shared < len(child.key):
                upper = Node(node, child.key[:shared])
                upper.slots, child.slots = child.slots[:shared], child.slots[shared:]
                node.children[tokens[0]] = upper
                child.key, child.parent = child.key[shared:], upper
                upper.children[child.key[0]] = child
                child = upper
            slots += child.slots
            tokens, node = tokens[shared:], child
        return node, slots

    def take(self, count):
        self.next_slot += count
        return list(range(self.next_slot - count, self.next_slot))


def requests_of(prompts, private=1, tree=None):
    """Requests over a tree, their page table, and their lengths (`private` tokens beyond)."""
    made, tree = [], tree or Tree()
    for prompt in prompts:
        node, slots = tree.insert(prompt)
        made.append((node, slots + tree.take(private)))
    longest = max(len(slots) for _, slots in made)
    table = np.zeros((len(made) + 1, longest), dtype=np.int32)
    requests = []
    for row, (node, slots) in enumerate(made, start=1):
        table[row, : len(slots)] = slots
        place = {"cache_protected_len": len(slots) - private, "req_pool_idx": row}
        requests.append(SimpleNamespace(last_node=node, rid=f"r{row}", **place))
    return requests, table, np.array([len(slots) for _, slots in made])


def make_state():
    server = {"port": 1, "rank": 0, "host": "sglang", "host_version": "0", "backend": "deft"}
    model = {"num_layers": 2, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    kind = {"policy": "auto", "device": "cpu", "dtype": "float32", "dtype_bytes": 4}
    return ServerState(**server, **model, **kind)


def model_runner(graphs="full", rows=4, **changes):
    """A model runner on the CPU in float32, of layers that nobody finds in its model."""
    table = SimpleNamespace(req_to_token=torch.zeros(9, 6400, dtype=torch.int32), size=rows)
    made = {"token_to_kv_pool": MHATokenToKVPool(), "req_to_token_pool": table, "device": "cpu"}
    made |= {"dtype": torch.float32, "kv_cache_dtype": torch.float32, "is_draft_worker": False}
    made |= {"model": torch.nn.Linear(1, 1), "ps": SimpleNamespace(tp_rank=0, attn_tp_rank=0)}
    made |= {"model_config": SimpleNamespace(num_attention_heads=8)}  # of two ranks
    arguments = {"port": 1, "speculative_algorithm": None, "enable_deterministic_inference": False}
    arguments |= {"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend=graphs))}
    arguments |= {"decode_log_interval": 40, "enable_metrics": False}
    return SimpleNamespace(**{**made, "server_args": SimpleNamespace(**arguments), **changes})


def make_layer(**changes):
    heads = {"tp_q_head_num": 4, "tp_k_head_num": 2, "tp_v_head_num": 2}
    shape = {**heads, "qk_head_dim": 64, "v_head_dim": 64, "layer_id": 0, "scaling": 0.125}
    cap = {"logit_cap": 0.0, "logit_capping_method": "tanh", "xai_temperature_len": -1}
    span = {"is_cross_attention": False, "sliding_window_size": -1, "use_irope": False}
    kind = {"attn_type": SimpleNamespace(value="decoder"), "pos_encoding_mode": "NONE"}
    return SimpleNamespace(**{**shape, **cap, **span, **kind, **changes})


class MHATokenToKVPool:
    """The only kind of pool that tree attention reads; `k` and `v` are those of layer 0."""

    store_dtype = torch.float32
    start_layer = 0
    layer_num = 2

    def __init__(self, slots=64, heads=2):
        shape, generator = (2, slots, heads, 64), torch.Generator().manual_seed(0)
        self.buffers = [torch.randn(shape, generator=generator).unbind() for _ in range(3)]
        self.k, self.v = self.buffers[0]

    def set_kv_buffer(self, layer, loc, k, v):
        held = self.buffers[layer.layer_id]
        held[0][loc.loc], held[1][loc.loc] = k.view(-1, 2, 64), v.view(-1, 2, 64)

    def get_key_buffer(self, layer_id):
        return self.buffers[layer_id][0]

    def get_value_buffer(self, layer_id):
        return self.buffers[layer_id][1]


class SWAKVPool:
    """Full-attention layers in one pool, layers with a sliding window in another."""

    def __init__(self, full, windowed, slots=64):
        self.full_kv_pool, self.swa_kv_pool = MHATokenToKVPool(slots), MHATokenToKVPool(slots)
        self.layers_mapping = {layer: (at, False) for at, layer in enumerate(full)}
        self.layers_mapping |= {layer: (at, True) for at, layer in enumerate(windowed)}

    def _of(self, layer_id):
        return self.swa_kv_pool if self.layers_mapping[layer_id][1] else self.full_kv_pool

    def set_kv_buffer(self, layer, loc, k, v):
        if self.layers_mapping[layer.layer_id][1]:
            assert loc.swa_loc is not None  # as in the host: only its backends know these pages
        self._of(layer.layer_id).set_kv_buffer(layer, loc, k, v)

    def get_key_buffer(self, layer_id):
        return self._of(layer_id).get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id):
        return self._of(layer_id).get_value_buffer(layer_id)


class HybridLinearKVPool:
    """Full-attention layers in a pool; linear layers keep a state elsewhere."""

    def __init__(self, full):
        self.full_kv_pool = MHATokenToKVPool()
        self.full_attention_layer_id_mapping = {layer: at for at, layer in enumerate(full)}


def decode_attention(pool, table, rows, lens, q, scale=0.125, sinks=None):
    """[B, 256] float64: decode attention, request by request, over the page table."""
    caches = (part.unsqueeze(1) for part in (pool.k, pool.v))
    tables, lens = torch.from_numpy(table[list(rows)]), torch.tensor(lens)
    given = (q.view(-1, 4, 64), *caches, tables, lens)
    return reference_attention(*given, sm_scale=scale, sinks=sinks).view(len(q), -1)


def recording_backend(host, pool, table):
    """A class of the host's backends that notes its `calls` and attends to nothing.

    It writes keys and values if it is asked to, as a host's backend does.
    """

    noted = []

    class HostBackend(host.AttentionBackend):
        token_to_kv_pool = pool
        req_to_token_pool = SimpleNamespace(req_to_token=torch.from_numpy(table))
        calls = noted

        def init_forward_metadata(self, forward_batch):
            self.calls.append("metadata")

        def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
            self.calls.append("capture" if in_capture else "replay")

        def init_forward_metadata_in_graph(self, forward_batch):
            self.calls.append("in graph")

        def forward_decode(self, q, k, v, layer, batch, save_kv_cache=True, **kwargs):
            self.calls.append("decode")
            self.write(k, v, layer, batch, save_kv_cache)
            return torch.zeros_like(q)

        def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, **kwargs):
            self.calls.append("extend")
            self.write(k, v, layer, batch, save_kv_cache)
            return q

        def write(self, k, v, layer, batch, save_kv_cache):
            if save_kv_cache and k is not None:
                loc = SimpleNamespace(loc=batch.out_cache_loc, swa_loc=batch.out_cache_loc)
                pool.set_kv_buffer(layer, loc, k, v)

    return HostBackend


def query(tokens=2, seed=1):
    """Queries, keys and values of a step."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, heads, 64, generator=generator) for heads in (4, 2, 2))
    return q.flatten(1), k, v


def make_batch(kind, table, rows, lens, new=1, **changes):
    """A forward batch over rows of a page table, as the host makes it.

    Each request has `new` query tokens, or its own number of a list. Its length includes them; the
    host leaves out drafts.
    """
    rows, lens = torch.as_tensor(rows), torch.as_tensor(lens)
    counts = [new] * len(rows) if isinstance(new, int) else new
    of_requests = zip(rows.tolist(), lens.tolist(), counts, strict=True)
    slots = np.concatenate([table[row, n - count : n] for row, n, count in of_requests])
    lens = lens - new if kind == "verify" else lens
    made = {"forward_mode": mode(kind), "batch_size": len(rows), "req_pool_indices": rows}
    made |= {"seq_lens": lens, "seq_lens_cpu": None, "seq_lens_sum": int(lens.sum())}
    made |= {"out_cache_loc": torch.from_numpy(slots).long(), "spec_info": None}
    return SimpleNamespace(**{**made, **changes})


def tree_layers(host, attention, host_layers=MappingProxyType({}), **options):
    """The layers of a model in which tree attention may run all but these."""
    division = Division({0: LayerShape(4, 2, 64)}, host_layers)
    return TreeLayers(host, attention, make_state(), division, **options)


class FakeServer:
    """Our `backend` around one of the host's, for batches of two requests and more; used as the
    host uses it.
    """

    def __init__(self, own, attention, batch=None, layers=tree_layers, **of_steps):
        self.own, self.attention, self.batch, self.calls = own, attention, batch, own.calls
        self.pool = own.token_to_kv_pool
        self.table = own.req_to_token_pool.req_to_token.numpy()
        self.surround(layers, **of_steps)

    def surround(self, layers=tree_layers, **of_steps):
        """With layers made by a function, and with options of steps."""
        vars(self.own).pop("deft", None)
        self.layers = layers(self.own, self.attention)
        self.state = self.layers.state
        self.steps = TreeSteps(self.layers, Settings(min_batch=2), **of_steps)
        self.backend = surround(self.own, self.steps)

    def forward(self, batch, layer=None, **changes):
        """One layer of a step, with the tensors of :func:`query`."""
        q, k, v = query(len(batch.out_cache_loc))
        given = {"q": q, "k": k, "v": v, "layer": layer or make_layer(), "forward_batch": batch}
        return self.backend.forward(**{**given, **changes})

    def layers_of(self, batch, *layers):
        """Layers of a step, at least one; the output of the last."""
        return [self.forward(batch, layer) for layer in layers or (None,)][-1]

    def step(self, batch, *layers):
        """An eager step; the output of its last layer."""
        self.backend.init_forward_metadata(batch)
        return self.layers_of(batch, *layers)

    def capture(self, batch, *layers):
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.captured = self.layers.step
        return self.launch(batch, *layers)

    def launch(self, batch, *layers):
        """What the capture of a batch records, and replays of its graph repeat."""
        self.layers.step = self.captured
        self.backend.init_forward_metadata_in_graph(batch)
        return self.layers_of(batch, *layers)

    def replay(self, batch):
        self.backend.init_forward_metadata_out_graph(batch)

    def close(self, out, batch, **step):
        """`out` is the decode attention of the batch."""
        rows, lens = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        q = query(len(rows))[0]
        expected = decode_attention(self.pool, self.table, rows, lens, q, **step)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def load_host():
    """The host's base class; the driver stand-in makes it importable without a driver."""
    pytest.importorskip("sglang")
    import ctypes

    if not has_nvidia_driver():
        ctypes.CDLL(str(ensure_driver_stub() / SONAME), mode=ctypes.RTLD_GLOBAL)
    import sglang.srt.layers.attention.base_attn_backend as module

    return module
