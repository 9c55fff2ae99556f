"""Low-precision tensors that a forward leaves anywhere meet the script's fp32 ones."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.model.outcome import State
from fasttrain.shim.levers.amp.kept import Reach
from fasttrain.shim.levers.amp.lever import KEEPS_ELSEWHERE
from support.rig import Probe

X = torch.tensor([[1.0, -2.0], [3.0, 1.0]])
CALLS = 5  # more than are watched
GLOBAL: Any = None
GLOBALS: list[Any] = []


class Record:
    """An object of the script's."""


class Slotted:
    """One without a dictionary."""

    __slots__ = ("h",)


class Leaving(nn.Module):
    """Leaves its features in one of many places."""

    last: Any = None

    def __init__(self, leave: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.leave = leave
        self.first, self.second = nn.Linear(2, 2), nn.Identity()
        self.memory: deque[Any] = deque(maxlen=2)
        self.record = Record()
        self.slotted = Slotted()

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        h = self.first(x)
        if self.leave is not None:
            self.leave(self, h, given)
        return self.second(h)


def as_global(_: Any, h: Tensor, __: Any) -> None:
    global GLOBAL
    GLOBAL = h


def in_a_closure() -> tuple[Any, Any]:
    kept: Any = None

    def leave(_: Any, h: Tensor, __: Any) -> None:
        nonlocal kept
        kept = h

    return leave, lambda *_: kept


# By attributes of its modules, which are followed.
FOLLOWED: dict[str, tuple[Any, Any]] = {
    "an attribute": (
        lambda model, h, _: setattr(model, "h", h),
        lambda model, _: model.h,
    ),
    "an attribute of torch's": (
        lambda model, h, _: setattr(model.second, "h", h),
        lambda model, _: model.second.h,
    ),
    "a tuple": (
        lambda model, h, _: setattr(model, "h", (h, None)),
        lambda model, _: model.h[0],
    ),
    "a deque": (
        lambda model, h, _: model.memory.append(h),
        lambda model, _: model.memory[-1],
    ),
}
# By what is outside of them: the model runs in fp32 from then on.
ELSEWHERE: dict[str, tuple[Any, Any]] = {
    "a global": (as_global, lambda *_: GLOBAL),
    "a list among the globals": (
        lambda _, h, __: GLOBALS.append(h),
        lambda *_: GLOBALS[-1],
    ),
    "a class": (
        lambda _, h, __: setattr(Leaving, "last", h),
        lambda *_: Leaving.last,
    ),
    "a closure": in_a_closure(),
    "an object": (
        lambda model, h, _: setattr(model.record, "h", h),
        lambda model, _: model.record.h,
    ),
    "an object without a dictionary": (
        lambda model, h, _: setattr(model.slotted, "h", h),
        lambda model, _: model.slotted.h,
    ),
    "a list that it is handed": (
        lambda _, h, given: given.append(h),
        lambda _, given: given[-1],
    ),
    "a namespace that it is handed": (
        lambda _, h, given: setattr(given, "h", h),
        lambda _, given: given.h,
    ),
}
GIVEN = {"a list that it is handed": list, "a namespace that it is handed": SimpleNamespace}


@pytest.fixture(autouse=True)
def _none_left() -> None:
    GLOBALS.clear()
    Leaving.last = None


def hold(place: str, leave: Any, get: Any) -> None:
    model = Leaving(leave)
    for _ in range(CALLS):
        given = GIVEN.get(place, Record)()
        out = model(X, given)
        h = get(model, given)
        assert h.dtype is torch.float32
        (h @ torch.ones(2, 3) + out.sum()).sum().backward()
        assert torch.autograd.grad(model(X, given).sum(), get(model, given))[0].shape == h.shape


@pytest.mark.parametrize("place", FOLLOWED)
def test_what_modules_keep_is_followed(amp: Any, place: str) -> None:
    hold(place, *FOLLOWED[place])
    assert (amp().state, amp().counts, amp().missed) == (
        State.APPLIED,
        {"forwards": 2 * CALLS},
        (),
    )


@pytest.mark.parametrize("place", ELSEWHERE)
def test_what_is_kept_elsewhere_ends_low_precision(amp: Any, place: str) -> None:
    hold(place, *ELSEWHERE[place])
    assert amp().counts == {"forwards": 1}
    (missed,) = amp().missed
    assert f"{KEEPS_ELSEWHERE}, in a" in missed


def test_an_attribute_that_appears_late(amp: Any) -> None:
    calls: list[int] = []

    def late(model: Any, h: Tensor, _: Any) -> None:
        calls.append(1)
        if len(calls) > CALLS:
            model.late = h

    model: Any = Leaving(late)
    for _ in range(CALLS + 1):
        model(X)
    assert model.late.dtype is torch.float32
    model.late = None
    model(X)
    assert model.late.dtype is torch.float32
    assert amp().counts == {"forwards": CALLS + 2}


def test_the_scripts_own_low_tensors_stay_low(rig: Any) -> None:
    own = [torch.ones(2, dtype=torch.bfloat16) for _ in range(5)]
    with rig(amp="bfloat16"):
        model: Any = Leaving(lambda _, h, given: given.append(h))
        model.table, model.one, model.record.h = [own[0]], own[1], own[2]
        given, GLOBALS[:] = [own[3]], [own[4]]
        for _ in range(CALLS):
            model(X, given)
    held = [model.table[0], model.one, model.record.h, given[0], GLOBALS[0]]
    assert all(a is b for a, b in zip(held, own, strict=True))
    assert {h.dtype for h in given[1:]} == {torch.float32}


def test_a_repeated_call_leaves_its_features_once(amp: Any) -> None:
    class Failing(Leaving):
        def forward(self, x: Tensor, given: Any = None) -> Tensor:
            given.append(x)
            y = super().forward(x, given)
            self.memory.append(y)
            return torch.zeros(2, 2).index_add_(0, torch.tensor([0, 1]), y)

    given: list[Any] = []
    model = Failing()
    model(X, given)
    assert amp().state is State.SKIPPED
    assert len(given) == len(model.memory) == 1
    assert model.memory[0].dtype is torch.float32


class Items(dict[str, Any]):
    """Has its items as attributes, too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


def record(**attributes: Any) -> Record:
    made = Record()
    vars(made).update(attributes)
    return made


def slotted(h: Tensor) -> Slotted:
    made = Slotted()
    made.h = h
    return made


# What a call returns, and how the script gets at the tensor in it.
RETURNED: dict[str, tuple[Any, Any]] = {
    "an object": (lambda h: record(h=h), lambda out: out.h),
    "an object without a dictionary": (slotted, lambda out: out.h),
    "an object in a list": (lambda h: [record(h=h)], lambda out: out[0].h),
    "an object in an object": (lambda h: record(r=record(h=h)), lambda out: out.r.h),
    "a tuple in an object": (lambda h: record(h=(1, (h, h))), lambda out: out.h[1][1]),
    "a dictionary in an object": (lambda h: record(h=({"h": h},)), lambda out: out.h[0]["h"]),
    "items that are attributes": (lambda h: Items(h=h), lambda out: out.h),
    "a function": (lambda h: lambda: h, lambda out: out()),
    "an iterator": (lambda h: iter([h]), next),
    "a view": (lambda h: {"h": h}.values(), lambda out: next(iter(out))),
}
FIXED: dict[str, tuple[Any, Any]] = {
    "a set": (lambda h: {h}, lambda out: out.pop()),
    "an iterator of a tuple": (lambda h: iter((h,)), next),
    "many objects": (lambda h: [record(h=h) for _ in range(1001)], lambda out: out[0].h),
}


class Returning(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(2, 2), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


@pytest.mark.parametrize("kind", RETURNED)
def test_objects_that_are_returned_hold_fp32(amp: Any, kind: str) -> None:
    make, get = RETURNED[kind]
    model = Returning(make)
    for call in range(2 * CALLS):
        with torch.set_grad_enabled(call > 1):
            h = get(model(X))
        assert h.dtype is torch.float32
        assert torch.equal(h, h.bfloat16())
    assert (amp().counts, amp().missed) == ({"forwards": 2 * CALLS}, ())


@pytest.mark.parametrize("kind", FIXED)
def test_what_cannot_be_cast_is_computed_again(amp: Any, kind: str) -> None:
    make, get = FIXED[kind]
    model = Returning(make)
    for _ in range(2):
        h = get(model(X))
        assert torch.equal(h, nn.functional.linear(X, model.layer.weight, model.layer.bias))
    assert amp().state is State.SKIPPED
    assert len(amp().missed) == 1


def test_items_that_are_attributes_stay_so(amp: Any) -> None:
    out = Returning(lambda h: Items(h=h))(X)
    out.h = 3
    assert out["h"] == 3


def test_the_scripts_own_low_tensors_in_what_it_gets_back_stay_low(amp: Any) -> None:
    class Filling(Returning):
        def forward(self, given: Any) -> Any:
            given.h = self.layer(given.x)
            return given

    own = X.bfloat16()
    given = record(x=X, own=own, pair=(own,))
    for _ in range(CALLS):
        assert Filling(None)(given) is given
        assert given.h.dtype is torch.float32
        assert given.own is given.pair[0] is own


class Hostile:
    """Says that it is something else, and fails when it is asked for anything."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


class OwnDict(dict[str, Any]):
    def items(self) -> Any:
        raise AssertionError


class Refusing(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError


def test_an_object_that_refuses_is_told_of() -> None:
    low = torch.ones(1, dtype=torch.bfloat16)
    assert Reach(torch.bfloat16).lift([Refusing(h=low)]) == "a Refusing"


def test_objects_of_any_kind_are_looked_through_or_left() -> None:
    low = torch.ones(1, dtype=torch.bfloat16)
    loop: list[Any] = []
    loop.append(loop)
    everything = [Hostile(), OwnDict(h=low), loop, iter(()), (i for i in [1]), Exception, object()]
    assert Reach(torch.bfloat16).lift(everything) == "a OwnDict"
    assert everything[1]["h"].dtype is torch.float32  # type: ignore[index]


class Unreadable(UserDict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)


def test_a_module_keeps_settings_that_cannot_be_read(amp: Any) -> None:
    model = Probe()
    model.settings = Unreadable(missing=None)
    assert model(X).dtype is torch.float32
    assert model.seen == [torch.bfloat16]
    assert amp().reason == ""


def test_the_end_of_a_long_list_and_of_a_long_dictionary() -> None:
    low = torch.ones(1, dtype=torch.bfloat16)
    items: list[Any] = [*range(100_000), low]
    pairs: dict[int, Any] = dict(enumerate(items))
    Reach(torch.bfloat16).lift(items, pairs)
    assert items[-1].dtype is pairs[100_000].dtype is torch.float32


def test_variables_of_a_function_stay_as_they_are(amp: Any) -> None:
    variables = locals()  # a script may save them
    model = Leaving()
    for _ in range(CALLS):
        model(X).sum().backward()
    assert set(variables) == {"amp"}


def test_what_a_checkpoint_keeps_is_left_to_it(amp: Any) -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            y: Tensor = torch.utils.checkpoint.checkpoint(self.second, h, use_reentrant=False)
            return y

    model = Checked()
    for _ in range(CALLS):
        model(X).sum().backward()
    assert (amp().counts, amp().missed) == ({"forwards": CALLS}, ())
