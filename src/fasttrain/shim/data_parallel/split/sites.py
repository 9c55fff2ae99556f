"""The decision for each kind of call of a root, and when it has to be verified again."""

from __future__ import annotations

import dis
import math
import sys
import weakref
from argparse import Namespace
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache, partial
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from fasttrain.shim.data_parallel.split.modules import Changes
from fasttrain.shim.data_parallel.split.rows import Gather, Rows
from fasttrain.shim.hooks.containers import (
    attributes_of,
    holds_by_attributes,
    is_scripts,
    items_of,
    map_tensors,
    module_name,
    tensors_in,
)

# A way to split a call: which dimension of which tensor is the batch.


# The batch dimension of each tensor of a call; None for a tensor that isn't split.
Dimensions = tuple[int | None, ...]
MOST_NUMBERS = 4096  # compared between ranks, of an output without rows
MOST_GUESSES = 6  # guesses tried per call


def candidates(inputs: Sequence[Tensor], world_size: int) -> list[Dimensions]:
    """Return guesses from sizes at the batch dimensions, likelier ones first; a trial decides.

    Args:
        inputs: The tensors among the arguments of a call.
        world_size: Number of ranks; a batch of fewer rows isn't split.
    """
    found = dict.fromkeys(_guesses(inputs))
    return [dims for dims in found if _rows(inputs, dims) >= world_size][:MOST_GUESSES]


def cut_alike(dims: Dimensions, entries: Sequence[str]) -> bool:
    """True if a guess cuts all entries of a list alike, or none, and so for those of a tuple.

    Entries of other sizes are samples, such as the boxes of each image. One of them alone is no
    batch, but its rows may agree by chance, as they do where an L1 loss is linear.

    Args:
        dims: The guess.
        entries: A result of `list_entries`.
    """
    found: dict[str, int | None] = {}
    return all(
        found.setdefault(entry, dim) == dim
        for entry, dim in zip(entries, dims, strict=True)
        if entry
    )


def list_entries(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return for each tensor of a call which others have its place in entries of the same list.

    Those have the same text; it is empty for a tensor outside of lists.
    """
    return list(_entries({**dict(enumerate(args)), **kwargs}, ""))


def _entries(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{path} {value.dim()}" if OF_LIST in path or _OF_TUPLE in path else ""
        return
    kinds = (dict, Tensor) if type(value) is tuple else ()
    items: Any = ()
    if isinstance(value, list | deque):
        items = ((OF_LIST, item) for item in value)
    elif kinds and all(isinstance(item, kinds) for item in value):  # as `zip(*batch)` gives it
        items = ((_OF_TUPLE, item) for item in value)
    elif isinstance(value, tuple):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = items_of(value).items()
    elif holds_by_attributes(value):
        items = attributes_of(value).items()
    for key, item in items:
        yield from _entries(item, f"{path}/{key}")


OF_LIST, _OF_TUPLE = "[*]", "(*)"  # any entry


def has_few_rows(inputs: Sequence[Tensor], world_size: int) -> bool:
    """True if the first dimension of every tensor is smaller than the number of ranks."""
    sizes = [tensor.size(0) for tensor in inputs if _has_rows(tensor)]
    return bool(sizes) and max(sizes) < world_size


def row_count(inputs: Sequence[Tensor], dims: Dimensions) -> int:
    """Return the number of rows in a call's batch; 0 if the arguments' sizes differ."""
    sizes = {
        tensor.size(dim) if tensor.dim() > dim else 0
        for tensor, dim in zip(inputs, dims, strict=True)
        if dim is not None
    }
    return sizes.pop() if len(sizes) == 1 else 0


_rows = row_count


def _guesses(inputs: Sequence[Tensor]) -> Iterator[Dimensions]:
    dense = [(at, t) for at, t in enumerate(inputs) if _has_rows(t)]
    for size in dict.fromkeys(t.size(0) for _, t in dense):
        split = [at for at, t in dense if t.size(0) == size]
        yield _dims(inputs, dict.fromkeys(split, 0))
        if len(split) > 1:
            for left_out in reversed(split):
                yield _dims(inputs, {at: 0 for at in split if at != left_out})
    for size in dict.fromkeys(t.size(1) for _, t in dense if t.dim() > 1):
        second = {at: 1 for at, t in dense if t.dim() > 1 and t.size(1) == size}
        first = {at: 0 for at, t in dense if t.dim() == 1 and t.size(0) == size}
        yield _dims(inputs, {**first, **second})


def _has_rows(tensor: Tensor) -> bool:
    """True if rows can be cut out of a tensor."""
    return bool(tensor.dim()) and tensor.layout is torch.strided and not tensor.is_nested


def _dims(inputs: Sequence[Tensor], split: dict[int, int]) -> Dimensions:
    return tuple(split.get(at) for at in range(len(inputs)))


@dataclass(frozen=True, slots=True)
class Split:
    """A way to split a call.

    Attributes:
        inputs: The batch dimension of each tensor among the arguments.
        outputs: The batch dimension of each tensor among the outputs.
        kept: Attributes with tensors that the call sets in its modules: the module's number in the
            order of `Module.modules`, the name, and the batch dimensions of the tensors.
        inner: True if the call returns or keeps tensors with rows along with a number that is
            computed from them.
        same: For each output tensor, the number of the argument that it is, or None.
        ndims: The number of dimensions of each tensor among the outputs.
        changed: All attributes and buffers that such calls replace or write to in their modules.
    """

    inputs: Dimensions
    outputs: Dimensions = ()
    kept: tuple[tuple[int, str, Dimensions], ...] = ()
    inner: bool = False
    same: Dimensions = ()
    ndims: tuple[int, ...] = ()
    changed: tuple[tuple[int, str], ...] = ()

    def cut(self, args: Any, kwargs: Any, rows: Rows) -> Any:
        """Return the arguments with this rank's rows."""
        given = iter(self.inputs)
        taken: dict[int, Tensor] = {}

        def take(tensor: Tensor) -> Tensor:
            dim = next(given)
            if dim is None:
                return tensor if not tensor.requires_grad else rows.share(tensor)
            if id(tensor) not in taken:
                taken[id(tensor)] = rows.take(tensor, dim)
            return taken[id(tensor)]

        return map_tensors(args, take), map_tensors(kwargs, take)

    @property
    def places(self) -> dict[tuple[int, str], bool]:
        """The attributes in which it leaves tensors; True if these have rows."""
        return {(n, name): any(dim is not None for dim in dims) for n, name, dims in self.kept}

    def with_earlier(self, other: Split) -> Split:
        """Return this split with what an earlier one has changed, and this one hasn't.

        What has rows is left out, as it is put together after each call that is split this way.
        """
        rows = {place for place, has_rows in other.places.items() if has_rows}
        changed = dict.fromkeys([*self.changed, *(p for p in other.changed if p not in rows)])
        kept = [each for each in other.kept if each[:2] not in {*self.changed, *rows}]
        return replace(self, kept=(*self.kept, *kept), changed=tuple(changed))

    def form(
        self,
        module: Module,
        output: Any,
        rows: Rows,
        written: Sequence[Tensor] = (),
        *,
        read: bool = False,
    ) -> tuple[str, list[float]] | None:
        """Return what all ranks must have alike in what a split call has made.

        Args:
            module: The module that was called.
            output: The output for this rank's rows.
            rows: The batch's rows.
            written: Buffers that the call may have written to.
            read: Read from devices, too.

        Returns:
            The kinds and sizes of all tensors, but for the number of rows, and numbers that stand
            for the values of those without rows; None if the form isn't that of earlier calls.
        """
        made = [(tensors_in(output), self.outputs)]
        parts = list(Module.modules(module)) if self.kept else []
        made += [(tensors_in(vars(parts[n]).get(name)), dims) for n, name, dims in self.kept]
        if any(len(tensors) != len(dims) for tensors, dims in made):
            return None
        pairs = [pair for of in made for pair in zip(*of, strict=True)]
        ndims = self.ndims or [tensor.dim() for tensor, _ in pairs]
        if any(tensor.dim() != ndim for (tensor, _), ndim in zip(pairs, ndims, strict=False)):
            return None  # such as by squeeze(), which drops the rows where there is one
        text, numbers = "", []
        for tensor, dim in pairs:
            sizes = [] if tensor.is_nested else list(tensor.shape)
            if dim is not None:
                if tensor.dim() <= dim or tensor.size(dim) % rows.own:
                    return None
                sizes[dim : dim + 1] = [tensor.size(dim) // rows.own]
            text += f"{tensor.dtype}{sizes}"
        alone = [t for t, dim in pairs if dim is None and t.numel() <= MOST_NUMBERS]
        for tensor in (*alone, *written):
            if (tensor.is_cpu or read) and _is_comparable(tensor):
                number = _number_of(tensor)
                finite = math.isfinite(number)
                numbers.append(number if finite else 0.0)
                text += "" if finite else str(number)
        return text, numbers

    def with_rows(self, module: Module, output: Any) -> list[Tensor]:
        """Return the tensors with rows that a call returns or keeps along with results of them."""
        if not self.inner:
            return []
        own = self.same or (None,) * len(self.outputs)
        found = list(zip(tensors_in(output), self.outputs, own, strict=True))
        parts = list(Module.modules(module)) if self.kept else []
        for number, name, dims in self.kept:
            tensors = tensors_in(vars(parts[number])[name])
            found += zip(tensors, dims, [None] * len(dims), strict=True)
        return [tensor for tensor, dim, at in found if dim is not None and at is None]

    def put_together(
        self, module: Module, output: Any, rows: Rows, gather: Gather, inputs: Sequence[Tensor]
    ) -> Any:
        """Return the whole call's output from each rank's, and gather attributes of modules.

        Args:
            module: The module that was called.
            output: The output for this rank's rows.
            rows: The batch's rows.
            gather: Returns a tensor with all rows from one with this rank's.
            inputs: The tensors among the arguments, as the script has passed them.
        """
        parts = list(Module.modules(module)) if self.kept else []
        for number, name, dims in self.kept:
            if any(dim is not None for dim in dims):
                vars(parts[number])[name] = with_all_rows(vars(parts[number])[name], dims, rows)
        if any(at is not None for at in self.same):
            own = zip(tensors_in(output), self.same, strict=True)
            known = {id(tensor): inputs[at] for tensor, at in own if at is not None}
            return with_all_rows(output, self.outputs, rows, gather, known)
        return with_all_rows(output, self.outputs, rows, gather)


def _is_comparable(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return plain and not tensor.is_complex()


def _number_of(tensor: Tensor) -> float:
    """Return a tensor's number, or one for its numbers, which cancels none of them."""
    values = tensor.detach()
    if values.numel() == 1:
        return float(values)
    values = values.reshape(-1).float()
    if values.numel() <= MOST_NUMBERS:
        values = values * torch.arange(1, values.numel() + 1, device=values.device)
    return float(torch.linalg.vector_norm(values))


def with_all_rows(
    value: Any,
    dims: Dimensions,
    rows: Rows,
    gather: Gather | None = None,
    known: Mapping[int, Tensor] | None = None,
) -> Any:
    """Return a value with the rows of all ranks in its tensors.

    Args:
        value: Containers of tensors with this rank's rows.
        dims: The batch dimension of each tensor in it.
        rows: The batch's rows.
        gather: Returns a tensor with all rows from one with this rank's.
        known: Replacements of tensors, by the tensors' ids.
    """
    given = iter(dims)
    whole: dict[int, Tensor] = dict(known or {})

    def gathered(tensor: Tensor) -> Tensor:
        dim = next(given)
        if dim is None and id(tensor) not in whole:
            return tensor
        if id(tensor) not in whole:
            assert dim is not None
            whole[id(tensor)] = rows.give(tensor, dim, gather)
        return whole[id(tensor)]

    return map_tensors(value, gathered)


# The decision for each kind of call of a root, and when it has to be verified again.


_SIMPLE = (bool, int, float, str, type(None))
_FACTOR = "\0a factor"  # stands for any float but 0 and 1
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

    Of a tensor it is its number, unless it is on a device, for which the host would wait.
    """
    if isinstance(value, Tensor):
        value = value.item() if value.is_cpu and value.numel() == 1 else None
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
    calls, print outside of calls.
    """
    methods = list(_functions(module))
    names = {f.__name__ for f in methods if f.__name__.startswith("__")} | {"forward"}
    for kind in _script_kinds(module):
        init = vars(kind).get("__init__")
        if isinstance(init, FunctionType):
            names |= _names_in(init.__code__)
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


FIRST = 4  # values of a place that are verified first; after them the 8th, 16th, ...
MOST_SEEN = 4096  # remembered per place


@dataclass(slots=True)
class Seen:
    """What earlier calls of a kind had: shapes, and values that a call may branch on.

    Each place has a count of its own: a counter, which has another value in each call, must not
    hide a flag that is set once.

    Attributes:
        of_places: The values at each place.
        classes: The `Limits.classes` of those of counters, each with its place.
        together: Values that were there in one call, but for places that had many.
        last: Those of the last call.
    """

    of_places: list[set[Any]] = field(default_factory=list)
    classes: set[Any] = field(default_factory=set)
    together: set[Any] = field(default_factory=set)
    last: tuple[Any, ...] = ()

    def note(self, values: tuple[Any, ...], limits: Limits) -> bool:
        """Note a call's values; return True if the call has to be verified for one of them."""
        if values == self.last:
            return False
        self.last = values
        self.of_places += [set() for _ in values[len(self.of_places) :]]
        new = [_noted(seen, value) for seen, value in zip(self.of_places, values, strict=False)]
        seldom = [
            value if len(seen) <= FIRST else None
            for seen, value in zip(self.of_places, values, strict=False)
        ]
        others = set()
        for at, (seen, value) in enumerate(zip(self.of_places, values, strict=False)):
            if type(value) is int and len(seen) > 1:
                others |= {(at, each) for each in limits.classes(value)}
        others -= self.classes
        self.classes |= others
        return _noted(self.together, tuple(seldom)) or any(new) or bool(others)


def _noted(seen: set[Any], value: Any) -> bool:
    if value in seen or len(seen) >= MOST_SEEN:
        return False
    seen.add(value)
    often = len(seen)
    return often <= FIRST or not often & (often - 1)


RETRIES = 4  # calls after which a refusal becomes final, even if numbers weren't wrong


@dataclass(slots=True)
class CallSite:
    """One kind of call of one root: its mode, and the kinds of its arguments.

    Attributes:
        calls: Number of calls.
        split: How it is split; None if it isn't.
        why_not: Why it isn't.
        final: True if no other way will be tried.
        few: True if the last call that was refused had few rows, which says nothing of others.
        name: The module, and the line at which its root was first called.
        verified: How often the split call agreed with the whole one.
        seen: What its calls had so far.
        most_rows: Number of rows of the largest verified batch.
        single: True if it was verified with a rank that had one row.
        decisions: Reads those values.
        hooks: Number of hooks registered anywhere at the last call.
        others: Modules that it may use without having them as parts.
        changes: What the split call changes in its modules; None before the first one.
        redone: How often a split call was made again, as it had changed more than verified ones.
    """

    name: str
    calls: int = 0
    split: Split | None = None
    why_not: str = ""
    final: bool = False
    few: bool = False
    verified: int = 0
    seen: Seen = field(default_factory=Seen)
    most_rows: int = 0
    single: bool = False
    hooks: int = 0
    others: list[weakref.ref[Module]] = field(default_factory=list)
    decisions: Decisions | None = None
    changes: Changes | None = None
    redone: int = 0

    def try_again(self) -> None:
        """Have the next call verified as the first one is."""
        self.calls, self.final, self.few = 0, False, False

    def is_due(
        self,
        values: tuple[Any, ...],
        rows: int = 0,
        fewest: int = 0,
        limits: Limits = Limits(),
        *,
        hooked: bool = False,
    ) -> bool:
        """Count a call; return True if it has to be verified.

        Args:
            values: The shapes of its arguments, and what else it may branch on, each at its place.
            rows: Number of rows of its batch.
            fewest: Smallest number of rows of any rank.
            limits: What counters among the values may be compared with.
            hooked: Whether hooks, modules or parameters were registered on what it uses.
        """
        self.calls += 1
        new = self.seen.note(values, limits)
        if self.final:
            return False
        again = new or not self.calls & (self.calls - 1)
        if self.split is None and self.why_not:
            return again and self.calls <= RETRIES
        # A part of a much larger batch may be what a whole one was so far: within a limit. With one
        # row, squeeze() drops the rows and a deviation is NaN.
        other = rows >= 2 * self.most_rows > 0 or (fewest == 1 and not self.single)
        return again or hooked or other


def saved(site: CallSite) -> dict[str, Any]:
    """Return a decision as a snapshot holds it."""
    split = site.split
    return {
        "calls": site.calls,
        "split": split and astuple(split),
        "why_not": site.why_not,
        "final": site.final,
        "few": site.few,
        "verified": site.verified,
        "most_rows": site.most_rows,
        "single": site.single,
        "seen": [list(map(_plain, seen)) for seen in site.seen.of_places],
        "classes": list(map(_plain, site.seen.classes)),
        "together": list(map(_plain, site.seen.together)),
    }


def _plain(value: Any) -> Any:
    """Return a value with tuples instead of shapes, and of what a snapshot makes of tuples."""
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def fill(site: CallSite, state: dict[str, Any]) -> None:
    """Restore a result of `saved`."""
    site.split = Split(*state["split"]) if state["split"] else None
    site.seen = Seen(
        [set(map(_plain, seen)) for seen in state["seen"]],
        set(map(_plain, state["classes"])),
        set(map(_plain, state["together"])),
    )
    for name in ("calls", "why_not", "final", "few", "verified", "most_rows", "single"):
        setattr(site, name, state[name])
