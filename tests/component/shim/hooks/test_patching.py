"""An attribute is replaced in a declared order, and put back as the object that it was."""

from __future__ import annotations

import datetime as dt
import math
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from enum import IntEnum
from itertools import permutations
from typing import Any

import pytest
from torch import Tensor

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.patching import PatchedTwiceError


class Place(IntEnum):
    INNER = 0
    MIDDLE = 1
    OUTER = 2


class Base:
    def inherited(self) -> str:
        return "own"

    @classmethod
    def of_class(cls) -> str:
        return "own"

    @staticmethod
    def static() -> str:
        return "own"


class Kind(Base):
    def method(self) -> str:
        return "own"

    of_class = vars(Base)["of_class"]
    static = vars(Base)["static"]


def module() -> Any:
    made: Any = types.ModuleType("module")
    made.function = lambda: "own"
    return made


def around(word: str) -> Callable[[Any], Any]:
    """Make wrappers that put a word in front of what lies beneath."""

    def make(original: Any) -> Any:
        if isinstance(original, classmethod | staticmethod):
            inner = original.__func__
            return type(original)(lambda *args: f"{word} {inner(*args)}")
        return lambda *args: f"{word} {original(*args)}"

    return make


TARGETS = [
    (Kind, "method", lambda: Kind().method()),
    (Kind, "inherited", lambda: Kind().inherited()),
    (Kind, "of_class", lambda: Kind.of_class()),
    (Kind, "static", lambda: Kind.static()),
]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = dict(patching._PATCHES)
    yield
    assert before == patching._PATCHES


@pytest.mark.parametrize(("owner", "name", "call"), TARGETS, ids=[t[1] for t in TARGETS])
def test_all_orders_of_coming_and_going(owner: Any, name: str, call: Callable[[], str]) -> None:
    before = dict(vars(owner))
    for coming in permutations(Place):
        for going in permutations(Place):
            undo = {place: ExitStack() for place in Place}
            there: list[Place] = []
            for place in coming:
                patching.wrap(owner, name, around(place.name), undo[place], place)
                there = sorted([*there, place], reverse=True)
                assert call() == " ".join([*(one.name for one in there), "own"])
            for place in going:
                undo[place].close()
                there.remove(place)
                assert call() == " ".join([*(one.name for one in there), "own"])
            assert vars(owner) == before
            assert all(vars(owner)[key] is value for key, value in before.items())


def test_what_is_beneath_a_change_stays_the_object_that_it_was() -> None:
    """Sets such as `os.supports_fd` hold it."""
    owner, inner, outer = module(), ExitStack(), ExitStack()
    made = patching.wrap(owner, "function", around("inner"), inner, Place.INNER)
    patching.wrap(owner, "function", around("outer"), outer, Place.OUTER)
    outer.close()
    assert owner.function is made
    inner.close()


def test_of_one_place_the_later_is_around() -> None:
    owner = module()
    with ExitStack() as undo:
        for word in ("first", "second"):
            patching.wrap(owner, "function", around(word), undo, Place.MIDDLE)
        assert owner.function() == "second first own"


@pytest.mark.parametrize("ours_goes_first", [True, False])
def test_what_the_script_puts_around_stays(ours_goes_first: bool) -> None:
    owner, first, later = module(), ExitStack(), ExitStack()
    original = owner.function
    ours = patching.wrap(owner, "function", around("ours"), first, Place.INNER)
    owner.function = scripts = around("script's")(ours)
    patching.wrap(owner, "function", around("later"), later, Place.INNER)
    assert owner.function() == "later script's ours own"
    for undo in (first, later) if ours_goes_first else (later, first):
        undo.close()
    assert owner.function is scripts
    owner.function = original


def test_the_script_may_take_its_own_away_again() -> None:
    owner = module()
    original = owner.function
    with ExitStack() as undo:
        ours = patching.wrap(owner, "function", around("ours"), undo)
        owner.function = around("script's")(ours)
        owner.function = ours
    assert owner.function is original


def test_a_value_where_nothing_was() -> None:
    with ExitStack() as undo:
        patching.put(Kind, "absent", 1, undo)
        assert vars(Kind)["absent"] == 1
        with pytest.raises(PatchedTwiceError):
            patching.put(Kind, "absent", 2, undo)
    assert not hasattr(Kind, "absent")


def test_a_class_that_is_written_in_c() -> None:
    before = vars(dt.datetime)["now"]
    with ExitStack() as undo:
        patching.put(dt.datetime, "now", classmethod(lambda _: "then"), undo)
        assert dt.datetime.now() == "then"
    assert vars(dt.datetime)["now"] is before
    assert dt.datetime.now(dt.UTC).year > 2000


def test_one_that_torch_inherits_from_c() -> None:
    assert "sigmoid" not in vars(Tensor)
    with ExitStack() as undo:
        patching.wrap(Tensor, "sigmoid", around("ours"), undo)
        assert "sigmoid" in vars(Tensor)
    assert "sigmoid" not in vars(Tensor)


def test_what_raises_changes_nothing() -> None:
    owner = module()
    with ExitStack() as undo:
        patching.wrap(owner, "function", around("ours"), undo, Place.OUTER)
        before = owner.function
        with pytest.raises(ZeroDivisionError):
            patching.wrap(owner, "function", lambda _: 1 / 0, undo, Place.INNER)
        assert owner.function is before


def _by(name: str, owner: Any, undo: ExitStack) -> None:
    """Replace an attribute as a module of a name would."""
    code = "patching.wrap(owner, 'function', lambda _: _, undo)"
    names = {"patching": patching, "owner": owner, "undo": undo, "__name__": name}
    exec(compile(code, name, "exec"), names)


def test_a_second_module_is_refused() -> None:
    owner = module()
    with ExitStack() as undo:
        _by("shim.one", owner, undo)
        _by("shim.one", owner, undo)
        for again in (
            lambda: _by("shim.other", owner, undo),
            lambda: patching.put(owner, "function", math.sin, undo),
            lambda: patching.wrap(owner, "function", around("seam"), undo, Place.INNER),
        ):
            with pytest.raises(PatchedTwiceError, match=r"module\.function .* shim\.one"):
                again()
    with ExitStack() as undo:
        patching.wrap(owner, "function", around("seam"), undo, Place.INNER)
        with pytest.raises(PatchedTwiceError):
            _by("shim.other", owner, undo)
