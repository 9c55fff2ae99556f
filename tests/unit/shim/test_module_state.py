"""Attributes and buffers of modules around a call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.module_state import ModuleState


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.zeros(3))
        self.calls = 0
        self.old = "there"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.aux = x.mean()
        self.queue = self.queue + 1
        del self.old
        return self.norm(x)  # type: ignore[no-any-return]


def test_what_a_call_leaves() -> None:
    module = Keeping()
    before = ModuleState(module)
    assert before.left() == {}
    module(torch.randn(4, 2))
    assert {name for _, name in before.left()} == {
        "calls", "aux", "queue", "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip


def test_a_call_can_be_made_from_the_state_before() -> None:
    module, x = Keeping(), torch.randn(4, 2)
    before = ModuleState(module)
    module(x)
    mean = module.norm.running_mean
    assert mean is not None
    value, version = mean.clone(), mean._version
    before.begin()
    assert (module.calls, module.old) == (0, "there")
    assert not hasattr(module, "aux")
    module(x)
    assert module.norm.running_mean is not mean
    torch.testing.assert_close(module.norm.running_mean, value)
    assert mean._version == version, "graphs may need it as it is"


def test_the_state_afterwards_comes_back_for_good() -> None:
    module, x = Keeping(), torch.randn(4, 2)
    before = ModuleState(module)
    module(x)
    after, buffers, aux = ModuleState(module), dict(module.named_buffers()), module.aux
    before.begin()
    module(x)
    after.put()
    assert {n: id(b) for n, b in module.named_buffers()} == {n: id(b) for n, b in buffers.items()}
    assert module.aux is aux
    assert module.calls == 1
    assert not hasattr(module, "old")
