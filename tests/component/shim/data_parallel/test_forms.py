"""What each rank's part of an output must have in common with the others'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.split.changes import Changes
from fasttrain.shim.data_parallel.split.rows import Rows
from fasttrain.shim.data_parallel.split.ways import Split


class Rank:
    def __init__(self, rank: int) -> None:
        self.rank, self.world_size = rank, 2


def form(split: Split, rank: int, output: Any) -> tuple[str, list[float]] | None:
    """Return the form of what a rank has made of a batch of 5, of which rank 0 gets 3."""
    ranks: Any = Rank(rank)
    return split.form(nn.Identity(), output, Rows(ranks, 5))


PAIR = Split((0,), (0, None), ndims=(2, 0))


def test_parts_of_one_batch_have_one_form() -> None:
    first = form(PAIR, 0, (torch.ones(3, 4), torch.ones(())))
    assert first is not None
    assert form(PAIR, 1, (torch.ones(2, 4), torch.ones(()))) == first


@pytest.mark.parametrize(
    "output",
    [
        (torch.ones(2, 5), torch.ones(())),
        (torch.ones(4, 4), torch.ones(())),
        (torch.ones(2, 4).double(), torch.ones(())),
        (torch.ones(4), torch.ones(())),
        (torch.ones(2, 4), torch.ones(2)),
        (torch.ones(2, 4),),
    ],
)
def test_parts_of_another_form_are_noticed(output: tuple[Tensor, ...]) -> None:
    assert form(PAIR, 1, output) != form(PAIR, 0, (torch.ones(3, 4), torch.ones(())))


@pytest.mark.parametrize("kept", [False, True])
def test_values_without_rows_are_compared(kept: bool) -> None:
    module: Any = nn.Identity()
    split = Split((0,), (), kept=((0, "seen", (None,)),)) if kept else Split((0,), (None,))
    ranks: Any = Rank(0)
    found = []
    for value in (0.0, 1.0, float("nan"), float("inf")):
        module.seen = torch.tensor(value)
        output = () if kept else (module.seen,)
        found.append(split.form(module, output, Rows(ranks, 5)))
    assert [numbers for _, numbers in filter(None, found)] == [[0.0], [1.0], [0.0], [0.0]]
    assert len({text for text, _ in filter(None, found)}) == 3


def test_values_on_a_device_are_read_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cpu", False)
    ranks: Any = Rank(0)
    for read in (False, True):
        made = Split((0,), (None,)).form(
            nn.Identity(), (torch.tensor([0.0, 1.0, 0.0]),), Rows(ranks, 5), read=read
        )
        assert made is not None
        assert made[1] == [2.0] * read


def test_what_a_module_keeps_is_noticed() -> None:
    split = Split((0,), (), kept=((0, "hidden", (0,)),))
    module: Any = nn.Identity()
    ranks: Any = Rank(0)
    forms = []
    for module.hidden in (torch.ones(3, 2), torch.ones(6, 2), None):
        forms.append(split.form(module, (), Rows(ranks, 5)))
    assert None not in forms[:2]
    assert forms[2] is None
    assert forms[0] != forms[1]


def test_buffers_that_a_call_writes_to_are_compared() -> None:
    ranks: Any = Rank(0)
    made = Split((0,)).form(nn.Identity(), (), Rows(ranks, 5), [torch.tensor(4), torch.ones(())])
    assert made is not None
    assert made[1] == [4.0, 1.0]
    large = Split((0,)).form(nn.Identity(), (), Rows(ranks, 5), [torch.full((10_000,), 2.0)])
    assert large is not None
    assert large[1] == [200.0]


def test_what_an_earlier_verified_call_has_changed_stays_foreseen() -> None:
    first = Split(
        (0,), kept=((0, "h", (0,)), (0, "mask", (None,))), changed=((0, "h"), (0, "mask"))
    )
    other = Split((0,), kept=((0, "new", (0,)),), changed=((0, "new"), (0, "step")))
    both = other.with_earlier(first)
    assert both.kept == ((0, "new", (0,)), (0, "mask", (None,)))
    assert set(both.changed) == {(0, "new"), (0, "step"), (0, "mask")}
    replaced = Split((0,), changed=((0, "mask"),)).with_earlier(first)
    assert replaced.kept == ()


def test_what_a_call_has_changed_is_restored() -> None:
    norm: Any = nn.BatchNorm1d(2)
    norm.calls = 1
    buffers = dict(norm.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    held = Changes(norm, [(0, "calls"), (0, "new"), *((0, name) for name in buffers)]).hold()
    norm(torch.randn(4, 2))
    norm.calls, norm.new = 2, 3
    norm.running_var = torch.zeros(2)
    held.restore()
    assert norm.calls == 1
    assert not hasattr(norm, "new")
    for name, buffer in norm.named_buffers():
        assert buffer is buffers[name]
        assert buffer.equal(before[name])
