"""Attributes and buffers of modules around a call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from fasttrain.shim.data_parallel.split.changes import Changes, ModuleState, parameter_sums


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


class Rare(nn.Module):
    """Does at other calls what the name says that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("hot", torch.zeros((), dtype=torch.long))
        self.register_buffer("large", torch.zeros(100_000), persistent=False)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor, does: str = "") -> Tensor:
        self.hot += (x > 50).any(1).sum()
        self.last = x
        if does == "replaces":
            self.mask = x
        elif does == "adds":
            self.calls = 1
        elif does == "keeps less":
            del self.last
        elif does == "writes":
            self.large[0] += 1
        elif does == "trains":
            with torch.no_grad():
                self.linear.weight += 1
        return self.linear(x)  # type: ignore[no-any-return]


def test_a_buffer_that_is_written_to_is_left_even_if_its_values_are_as_before() -> None:
    module = Rare()
    before = ModuleState(module)
    before.begin()
    module(torch.zeros(4, 2))
    assert before.left().keys() == {(0, "hot"), (0, "last")}


@pytest.mark.parametrize(
    ("does", "foreseen", "lost"),
    [("", True, False), ("replaces", False, False), ("adds", False, False),
     ("keeps less", False, False), ("writes", False, True), ("trains", True, True)],
)  # fmt: skip
def test_what_no_verified_call_has_changed_is_noticed(
    does: str, foreseen: bool, lost: bool
) -> None:
    module, x = Rare(), torch.full((4, 2), 60.0)
    changes = Changes(module, [(0, "hot"), (0, "last")], {(0, "last"): True})
    held = changes.hold()
    module(x, does)
    assert (held.is_foreseen(), held.has_lost()) == (foreseen, lost)
    assert [int(buffer) for buffer in held.buffers()] == [4]
    held.restore()
    assert int(module.hot) == 0
    assert not vars(module).keys() & {"last", "calls"}
    assert module.mask is None


def test_modules_whose_class_torch_has_derived_are_looked_at() -> None:
    module = Rare()
    register_parametrization(module.linear, "weight", nn.Identity())
    register_parametrization(module, "hot", nn.Identity(), unsafe=True)
    assert type(module).__module__.startswith("torch.")
    held = Changes(module, []).hold()
    module.mask = torch.ones(1)
    assert not held.is_foreseen()


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


class Mixed(nn.Module):
    """Has parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.complex64)):
            setattr(self, f"p{number}", nn.Parameter(torch.ones(3, dtype=dtype)))
        packed = torch.ones(3, dtype=torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)


@pytest.mark.parametrize("name", ["p0", "p1", "p2", "packed"])
def test_what_is_written_past_the_versions_shows(name: str) -> None:
    module = Mixed()
    before, version = parameter_sums(module), getattr(module, name)._version
    getattr(module, name).data[1].add_(2)
    assert getattr(module, name)._version == version
    assert parameter_sums(module) != before


def test_a_change_of_signs_and_a_change_that_keeps_the_sum_show() -> None:
    module = nn.Linear(2, 1, bias=False)
    module.weight.data = torch.tensor([[1.0, -1.0]])
    sums = []
    for values in ([1.0, -1.0], [-1.0, -1.0], [2.0, -2.0]):
        module.weight.data.copy_(torch.tensor([values]))
        sums.append(parameter_sums(module))
    assert len({tuple(found) for found in sums}) == 3


def test_no_number_is_no_change() -> None:
    module = nn.Linear(2, 1)
    module.weight.data.fill_(float("nan"))
    assert parameter_sums(module) == parameter_sums(module)
    assert parameter_sums(nn.LazyLinear(2)) == []


def test_growth_is_seen() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ModuleList())
    before = ModuleState(module)
    assert not before.has_grown(module)
    module[1].append(nn.Identity())
    assert before.has_grown(module)
    before = ModuleState(module)
    module[0].scale = nn.Parameter(torch.ones(1))
    assert before.has_grown(module)
