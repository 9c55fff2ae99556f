"""What a forward may decide by that is no argument."""

from __future__ import annotations

import gc
import weakref
from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.split.decisions import Decisions, argument_values, may_print
from fasttrain.shim.data_parallel.split.sites import CallSite, fill, saved
from fasttrain.shim.data_parallel.split.ways import Split

EPOCH = 0
ARGS = Namespace(stage=1, name="x")
CFG = {"stage": 1, "name": "x"}
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


class Settings:
    stage = 1


class Configured(Net):
    settings = Settings

    def __init__(self) -> None:
        super().__init__()
        self.config = Settings()

    def forward(self, x: Tensor) -> Tensor:
        stage = ARGS.stage + int(CFG["stage"]) + self.config.stage + self.settings.stage
        return self.linear(x) * stage  # type: ignore[no-any-return]


class Periodic(Net):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.every = 0, 50

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        if (self.step > 120 and (self.step + 1) % self.every == 0) or self.step in (300, 400):
            x = x - x.mean(0)
        return self.linear(x)  # type: ignore[no-any-return]


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


class PrintingLayers(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.make(of) for of in range(2)]

    def make(self, of: int) -> nn.Module:
        print("layer", of)  # noqa: T201
        return nn.Linear(3, 3)


class PrintingByAttributeOfSetup(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.set_up()

    def set_up(self) -> None:
        self.log = self.show


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


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(0))
        self.register_buffer("rate", torch.tensor(0.5))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("unnamed", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        if not self.step.item() % 50:
            x = x - x.mean(0)
        return self.linear(x) * self.rate + self.mean  # type: ignore[no-any-return]


def test_counters_in_buffers_are_looked_at() -> None:
    net = Counting()
    decisions = Decisions(net)
    seen = [decisions.values()]
    net.unnamed += 1
    net.mean += 1
    net.rate += 0.25
    assert decisions.values() == seen[-1]
    net.step += 1
    seen.append(decisions.values())
    net.step = torch.tensor(2)
    seen.append(decisions.values())
    assert len(set(seen)) == 3
    assert 50 in decisions.limits.divisors


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
    assert may_print(PrintingByAttributeOfSetup()) == "Fitted.show"
    assert may_print(PrintingLayers()) == ""


def test_a_much_larger_batch_is_verified() -> None:
    site = CallSite("Net", split=Split((0,)), most_rows=8)
    rows = [8, 8, 8, 8, 8, 10, 12, 14, 15, 15, 16, 16]
    due = [site.is_due(("shape", of), of) for of in rows]
    # calls 1, 2, 4 and 8, the first shapes, and twice the rows that were verified
    assert due == [True, True, False, True, False, True, True, True, False, False, True, True]
    site.most_rows = 16
    assert not site.is_due(("shape", 16), 16)


def test_a_batch_of_which_a_rank_gets_one_row_is_verified() -> None:
    site = CallSite("Net", split=Split((0,)), most_rows=8)
    fewest = [4, 4, 4, 4, 4, 1]
    due = [site.is_due(("shape",), 2 * of, of) for of in fewest]
    assert due == [True, True, False, True, False, True]
    site.single = True
    assert not site.is_due(("shape",), 2, 1)


def test_settings_in_objects_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Configured()
    decisions = Decisions(net)
    seen = [decisions.values()]
    monkeypatch.setattr(ARGS, "stage", 2)
    seen.append(decisions.values())
    monkeypatch.setitem(CFG, "stage", 2)
    seen.append(decisions.values())
    net.config.stage = 2
    seen.append(decisions.values())
    monkeypatch.setattr(Settings, "stage", 3)
    seen.append(decisions.values())
    net.config = Settings()
    seen.append(decisions.values())
    assert len(set(seen)) == 6
    monkeypatch.setattr(ARGS, "name", "y")
    monkeypatch.setitem(CFG, "name", "y")
    assert decisions.values() == seen[-1]


def test_numbers_in_arguments_are_looked_at() -> None:
    x = torch.ones(2)
    assert argument_values((x, 0.0, [1, 2]), {"on": x}) == (None, 0.0, (1, 2), None)
    calls: list[Any] = [(x, 0.5), (x, 0.25), (x, 1.0), (x, (x, 1, {"a": "b"})), (x, None)]
    first, *others = [argument_values(call, {}) for call in calls]
    assert first == others[0], "a float that goes on"
    assert others[1:] == [(None, 1.0), (None, (1, ("b",))), (None, None)]


def test_a_counter_hides_no_flag() -> None:
    site = CallSite("Net", split=Split((0,)), most_rows=8)
    values = [("shape", call, call // 100, call >= 700) for call in range(1, 1000)]
    due = [call for call, of in enumerate(values, 1) if site.is_due(of, 8)]
    epochs = [100, 200, 300, 700]  # the 2nd, 3rd and 4th, and the 8th with the flag
    assert due == sorted([1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, *epochs])
    other = CallSite("Net")
    fill(other, saved(site))
    assert other.seen.of_places == site.seen.of_places
    assert not other.is_due(values[-1], 8)


def test_what_only_some_calls_do_by_a_counter_is_verified() -> None:
    site, decisions = CallSite("Net", split=Split((0,))), Decisions(net := Periodic())
    due = []
    for net.step in range(1, 10_000):
        if site.is_due(decisions.values(), limits=decisions.limits):
            due.append(net.step)
    assert {49, 120, 121, 149, 300, 301, 400, 401} <= set(due)
    assert len(due) < 60
    other = CallSite("Net")
    fill(other, saved(site))
    assert other.seen.classes == site.seen.classes


def test_shapes_are_verified_as_often_whatever_else_changes() -> None:
    site = CallSite("Net", split=Split((0,)), most_rows=8)
    due = [at for at in range(1, 600) if site.is_due(((at // 10,),), 8)]
    assert [at for at in due if at & (at - 1)] == [10, 20, 30, 70, 150, 310]


class Whitening(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if self.seen is None else x - x.mean(0) * self.seen)  # type: ignore[no-any-return]


def test_a_tensor_in_the_place_of_none_is_another_value() -> None:
    net = Whitening()
    decisions = Decisions(net)
    values = [decisions.values()]
    for net.seen in (torch.ones(2), torch.zeros(2)):
        values.append(decisions.values())
    assert values[0] != values[1] == values[2]
