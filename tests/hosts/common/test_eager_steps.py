"""Layers of eager steps that repeat the launches of the layer before."""

from types import SimpleNamespace

import torch

from deft_backend.hosts.common.eager_steps import Repeats


def test_a_repeat_with_other_bits_ends_all_repeats():
    answers, warned = [], []

    def repeat(layer, q, out):
        out.fill_(answers[-1])
        return True

    attention = SimpleNamespace(device=torch.device("cuda"), repeat=repeat)
    repeats = Repeats(attention, SimpleNamespace(warn=warned.append), verify=False)
    out = torch.zeros(2, dtype=torch.bfloat16)
    layer = (None, None, out)
    answers.append(1.0)
    assert not repeats.repeat(*layer, (1, 1))  # not before a trial
    repeats.run(lambda: out.fill_(1.0), *layer, (1, 1))
    assert repeats.repeat(*layer, (1, 1))
    assert not repeats.repeat(*layer, (2, 1))
    answers.append(2.0)
    repeats.run(lambda: out.fill_(1.0), *layer, (2, 1))
    assert out.tolist() == [1.0, 1.0]
    assert not repeats.repeat(*layer, (1, 1))
    assert (repeats.on, len(warned)) == (False, 1)
