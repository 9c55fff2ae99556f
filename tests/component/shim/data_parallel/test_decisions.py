"""What a forward may decide by that is no argument."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch import Tensor, nn

from fasttrain.shim.data_parallel.split.sites import CallSite, Decisions, Split, may_print

EPOCH = 0
RATE = 0.5


class Net(nn.Module):
    centre = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.stage = 1
        self.unused = "x"

    def forward(self, x: Tensor) -> Tensor:
        if EPOCH > 3 or self.centre or self.stage > 1:
            x = x - x.mean(0)
        return self.linear(x) * RATE  # type: ignore[no-any-return]


class Fitted(Net):
    def fit(self, x: Tensor) -> None:
        self(x)
        self.show()

    def show(self) -> None:
        print("seen")  # noqa: T201


class Printing(Fitted):
    def forward(self, x: Tensor) -> Tensor:
        return max([x], key=lambda _: self.show() or 0)


class PrintingByAttribute(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.log = self.show

    def forward(self, x: Tensor) -> Tensor:
        self.log()
        return x


class PrintingByName(Fitted):
    def forward(self, x: Tensor) -> Tensor:
        getattr(self, "sh" + "ow")()
        return x


def test_globals_attributes_and_modes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    decisions = Decisions(net)
    seen = [decisions.values()]
    monkeypatch.setitem(globals(), "EPOCH", 7)
    seen.append(decisions.values())
    net.centre = True  # of the class before
    seen.append(decisions.values())
    net.stage = 2
    seen.append(decisions.values())
    net.linear.eval()
    seen.append(decisions.values())
    assert len(set(seen)) == 5


def test_what_no_code_asks_for_and_numbers_that_go_on_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Net()
    decisions = Decisions(net)
    before = decisions.values()
    net.unused = "y"
    monkeypatch.setitem(globals(), "RATE", 0.25)
    assert decisions.values() == before


def test_no_module_is_kept() -> None:
    net = Net()
    net.linear.used_by = net.forward  # a part that refers to the whole
    decisions, ref = Decisions(net), weakref.ref(net)
    del net
    gc.collect()
    assert ref() is None
    assert decisions.values()


def test_code_that_may_print() -> None:
    assert may_print(Net()) == ""
    assert may_print(Fitted()) == ""
    assert may_print(nn.Sequential(Net(), Printing())) == "Fitted.show"
    assert may_print(PrintingByName()) == "Fitted.show"
    assert may_print(PrintingByAttribute()) == "Fitted.show"


def test_a_much_larger_batch_is_verified() -> None:
    site = CallSite("Net", split=Split((0,)), most_rows=8, hooks=0)
    rows = [8, 8, 8, 8, 8, 10, 12, 14, 15, 15, 16, 16]
    due = [site.is_due(("shape", of), 0, of) for of in rows]
    # calls 1, 2, 4 and 8, the first shapes, and twice the rows that were verified
    assert due == [True, True, False, True, False, True, True, True, False, False, True, True]
    site.most_rows = 16
    assert not site.is_due(("shape", 16), 0, 16)


def test_a_batch_of_which_a_rank_gets_one_row_is_verified() -> None:
    site = CallSite("Net", split=Split((0,)), most_rows=8, hooks=0)
    fewest = [4, 4, 4, 4, 4, 1]
    due = [site.is_due("shape", 0, 2 * of, of) for of in fewest]
    assert due == [True, True, False, True, False, True]
    site.single = True
    assert not site.is_due("shape", 0, 2, 1)
