"""Values besides its arguments on which a root's call may branch, found in its code."""

from __future__ import annotations

import dis
import math
import sys
import weakref
from argparse import Namespace
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from fasttrain.shim.hooks.containers import (
    attributes_of,
    holds_by_attributes,
    is_scripts,
    items_of,
    module_name,
)

_SIMPLE = (bool, int, float, str, type(None))
_EXACT = frozenset((bool, int, str, type(None)))  # their values themselves, asked for first
_FACTOR = "\0a factor"  # stands for any float but 0 and 1
_TENSOR = "\0a tensor"  # stands for one whose numbers aren't read
_OBJECT = "\0an object"  # stands for what is no number and no text
_NAMESPACES = (Namespace, SimpleNamespace)
MOST_VALUES = 64  # values compared before each call
# What returns a dictionary, a name in it, and a class that may have it. Not a module's dictionary
# itself, which leads back to the module where a part refers to it, such as by a bound method.
Place = tuple[Callable[[], dict[str, Any]], str, Any]


class Decisions:
    """Values other than arguments on which a forward may branch: of attributes, buffers, globals.

    A call with other values than all verified calls has to be verified, too.

    Args:
        module: The root.

    Attributes:
        limits: The numbers that a counter among the values may be compared with or divided by.
    """

    def __init__(self, module: Module) -> None:
        self._places: list[Place] = []
        for place in _places(module):
            if len(self._places) == MOST_VALUES:
                break
            self._places.append(place)
        self.limits = Limits.of(module, self.values())

    def values(self) -> tuple[Any, ...]:
        """Return the present values, each at the same place in each call."""
        return tuple([
            _category(slot[name] if name in (slot := find()) else getattr(kind, name, None))
            for find, name, kind in self._places
        ])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers in the code of a root that may decide what a counter's value means.

    What happens in every 50th call, or from the 1000th on, is in none of the calls 1, 2, 4, 8 ...

    Attributes:
        thresholds: What the code may compare a counter with, and the numbers before those.
        divisors: What it may divide one by.
    """

    thresholds: tuple[int, ...] = ()
    divisors: tuple[int, ...] = ()

    @classmethod
    def of(cls, module: Module, values: Iterable[Any]) -> Limits:
        """Return those in the script's code for a root's modules, and settings that it reads."""
        settings = {value for value in values if _is_limit(value)}
        compared, divided = set(), set()
        for function in _functions(module):
            given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            for code in _codes_in(function.__code__):
                signs, numbers = _signs_and_numbers(code)
                numbers = settings.union(numbers, filter(_is_limit, given))
                if signs & _COMPARING:
                    compared |= numbers
                if signs & _DIVIDING:
                    divided |= numbers
        thresholds = {at for number in compared for at in (int(number) - 1, int(number))}
        return cls(tuple(sorted(thresholds)), tuple(sorted(map(int, divided))))

    def classes(self, value: int) -> list[Any]:
        """Return what a branch may see in a counter's value: its side of each limit, a remainder.

        A condition on a remainder may hold on one side of a limit only.
        """
        side = bisect_left(self.thresholds, value), bisect_right(self.thresholds, value)
        rest = [(by, value % by) for by in self.divisors]
        return [side, *((side, by, at) for by, at in rest if at in (0, 1, by - 1))]


NO_LIMITS = Limits()
_COMPARING = frozenset(("<", "<=", "==", "!=", ">", ">=", "in"))
_DIVIDING = frozenset(("%", "%=", "//", "//="))


def _is_limit(value: Any) -> bool:
    return type(value) in (int, float) and value >= 2 and value == value // 1 < math.inf


@lru_cache(4096)
def _signs_and_numbers(code: CodeType) -> tuple[set[str], set[int]]:
    """Return the operators in code, and the numbers that may be limits."""
    signs, numbers = set(), set()
    for each in dis.get_instructions(code):
        if each.opname in ("BINARY_OP", "COMPARE_OP"):
            signs.add(each.argrepr.removeprefix("bool(").removesuffix(")"))  # so from 3.13 on
        elif each.opname == "CONTAINS_OP":
            signs.add("in")
        elif each.opname.startswith("LOAD_"):
            of = each.argval if isinstance(each.argval, tuple | frozenset) else (each.argval,)
            numbers |= {number for number in of if _is_limit(number)}
    return signs, numbers


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of functions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes_in(each)


def _category(value: Any) -> Any:
    """Return what a forward may branch on: of a float, only whether it is 0, 1 or another one.

    Of a tensor it is its number, unless it is on a device, for which the host would wait, and
    otherwise that it is one: what was None before may now be what all rows are compared with.
    """
    if type(value) in _EXACT:
        return value
    if isinstance(value, Tensor):
        value = value.item() if value.is_cpu and value.numel() == 1 else _TENSOR
    if type(value) is float:
        return value if value in (0.0, 1.0) else _FACTOR
    return value if isinstance(value, _SIMPLE) else _OBJECT


def argument_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the numbers and texts in each argument of a call, on which a forward may branch."""
    return tuple(map(_simple_in, (*args, *kwargs.values())))


def _simple_in(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None
    if isinstance(value, _SIMPLE):
        return _category(value)
    items: Any = ()
    if isinstance(value, tuple | list | deque):
        items = value
    elif isinstance(value, Mapping):
        items = items_of(value).values()
    elif holds_by_attributes(value):
        items = attributes_of(value).values()
    found = [simple for item in items if (simple := _simple_in(item)) is not None]
    return tuple(found[:MOST_VALUES]) or None


def may_print(module: Module) -> str:
    """Return the first method that calls print and that a call of the root may reach; else empty.

    Reached are forward, methods such as ``__getattr__``, those that ``__init__`` names, as to keep
    them under another name, and what they call by name. Others, such as a ``fit`` that the script
    calls or layers that ``__init__`` makes by calling a method, print outside of calls.
    """
    methods = list(_functions(module))
    names = {f.__name__ for f in methods if f.__name__.startswith("__")} | {"forward"}
    names |= _names_kept(module, methods)
    pending, reached = list(names), set(names)
    while pending:
        name = pending.pop()
        for function in (f for f in methods if f.__name__ == name):
            used = _names_in(function.__code__)
            if "print" in used:
                return function.__qualname__
            if "getattr" in used:  # may call any
                used |= {f.__name__ for f in methods}
            pending += used - reached
            reached |= used
    return ""


def _names_kept(module: Module, methods: list[FunctionType]) -> set[str]:
    """Return the names that ``__init__`` uses, with methods that it calls, but to call a method."""
    inits = [vars(kind).get("__init__") for kind in _script_kinds(module)]
    pending = [init.__code__ for init in inits if isinstance(init, FunctionType)]
    kept, called = set[str](), set[str]()
    while pending:
        own_kept, own_called = _uses(pending.pop())
        pending += [f.__code__ for f in methods if f.__name__ in own_called - called]
        kept |= own_kept
        called |= own_called
    return kept


@lru_cache(maxsize=1024)
def _uses(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that code uses, and apart from them those of methods that it calls."""
    kept, called = set[str](), set[str]()
    for each in dis.get_instructions(code):
        if each.opcode in dis.hasname:
            method = each.opname == "LOAD_METHOD"
            if each.opname == "LOAD_ATTR" and sys.version_info >= (3, 12):
                method = bool((each.arg or 0) & 1)
            (called if method else kept).add(each.argval)
    inner = [_uses(each) for each in code.co_consts if isinstance(each, CodeType)]
    parts = zip((kept, called), *inner, strict=True)
    all_kept, all_called = (frozenset[str]().union(*names) for names in parts)
    return all_kept, all_called


def _names_in(code: CodeType, *, texts: bool = False) -> set[str]:
    """Return the names that code uses, with that of functions in it; and its texts, if wanted."""
    inner = [_names_in(each, texts=texts) for each in code.co_consts if isinstance(each, CodeType)]
    own = {text for text in code.co_consts if texts and isinstance(text, str)}
    return own.union(code.co_names, *inner)


def _places(module: Module) -> Iterator[Place]:
    parts = list(Module.modules(module))
    for part in parts[: MOST_VALUES // 2]:
        yield (partial(_attributes, weakref.ref(part)), "training", None)
    for function in _functions(module):
        names = [name for name in function.__code__.co_names if name in function.__globals__]
        used = _names_in(function.__code__, texts=True)
        yield from _of_slot(partial(_itself, function.__globals__), names, None, used)
    for part in parts:
        used = set(_names(type(part), texts=True))
        find = partial(_attributes, weakref.ref(part))
        yield from _of_slot(find, _names(type(part)), type(part), used)
        for name, buffer in part._buffers.items():
            if name in used and buffer is not None and not is_lazy(buffer) and buffer.numel() == 1:
                yield (partial(_buffers, weakref.ref(part)), name, None)


def _of_slot(
    find: Callable[[], dict[str, Any]], names: Iterable[str], kind: Any, used: set[str]
) -> Iterator[Place]:
    """Yield the places of simple values in a dictionary, and in objects in it that hold settings.

    Args:
        find: Returns the dictionary.
        names: Names in it.
        kind: A class that may have them; or None.
        used: What the code has names or texts for.
    """
    slot = find()
    for name in names:
        value = slot.get(name, getattr(kind, name, _names))
        if isinstance(value, _SIMPLE):
            yield (find, name, kind)
            continue
        if (held := _settings_in(value)) is None:
            continue
        of = value if isinstance(value, type) else type(value)
        for inner in sorted(used):
            if isinstance(held.get(inner, getattr(of, inner, _names)), _SIMPLE):
                yield (partial(_settings, find, name, kind), inner, of)


def _settings(find: Callable[[], dict[str, Any]], name: str, kind: Any) -> dict[str, Any]:
    return _settings_in(find().get(name, getattr(kind, name, None))) or {}


def _settings_in(value: Any) -> dict[str, Any] | None:
    """Return what a dictionary, a namespace, or an object or a class of the script's holds."""
    if type(value) is dict:
        return value
    of: Any = value if isinstance(value, type) else type(value)
    if issubclass(of, Module | Tensor) or not (of in _NAMESPACES or _is_scripts(of)):
        return None
    held: dict[str, Any] | None = getattr(value, "__dict__", None)
    return held


def _itself(values: dict[str, Any]) -> dict[str, Any]:
    return values


def _attributes(ref: weakref.ref[Module]) -> dict[str, Any]:
    part = ref()
    return vars(part) if part is not None else {}


def _buffers(ref: weakref.ref[Module]) -> dict[str, Any]:
    part = ref()
    return part._buffers if part is not None else {}


def _names(kind: type, *, texts: bool = False) -> list[str]:
    """Return the names that the code of one of the script's classes uses; and its texts."""
    functions = [f for base in kind.__mro__ if _is_scripts(base) for f in _methods(base)]
    codes = [function.__code__ for function in functions]
    if texts:
        return sorted(set().union(*(_names_in(code, texts=True) for code in codes)))
    return sorted({name for code in codes for name in code.co_names})


def _methods(kind: type) -> list[FunctionType]:
    found = [f for f in vars(kind).values() if isinstance(f, FunctionType)]
    return [f for f in found if f.__name__ != "__init__"]


def _functions(module: Module) -> Iterator[FunctionType]:
    """Yield the methods of a root's modules whose classes are the script's own."""
    for kind in _script_kinds(module):
        yield from _methods(kind)


def modules_in_globals(module: Module) -> list[Module]:
    """Return the modules in globals, and in containers there, that a root's code has names for."""
    found: list[Any] = []
    for function in _functions(module):
        slot = function.__globals__
        for value in [slot[name] for name in _names_in(function.__code__) if name in slot]:
            items = value.values() if type(value) is dict else value
            found += items if type(value) in (dict, list, tuple) else [value]
    roots = [value for value in found if issubclass(type(value), Module)]
    return [part for root in roots for part in Module.modules(root)]


def _script_kinds(module: Module) -> list[Any]:
    """Return the script's own classes of a root's modules, by name."""
    kinds = {kind for part in Module.modules(module) for kind in type(part).__mro__}
    own = filter(_is_scripts, kinds)
    return sorted(own, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


def _is_scripts(kind: type) -> bool:
    name = module_name(kind)
    path = getattr(sys.modules.get(name), "__file__", None) or ("" if name == "__main__" else "<")
    return is_scripts(path)
