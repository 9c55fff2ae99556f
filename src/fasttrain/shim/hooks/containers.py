"""Tensors inside containers and objects: how they are found, and how they are cast."""

from __future__ import annotations

import copy
import functools
import gc
import sys
from collections import OrderedDict, deque
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MappingView,
    MutableMapping,
    Sequence,
)
from dataclasses import is_dataclass
from itertools import islice
from operator import is_, setitem
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from fasttrain.shim.process.callsite import is_installed, is_shim_code

# Lists what objects hold (attributes, items, closures, globals), for searches through them.


LONG = 1_000  # of a longer container only the end is searched
# Those of C's own hold what they go through: a list, a dictionary, other iterators.
_WAYS_TO_ITEMS = (Iterator, MappingView, MappingProxyType)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that a class statement has made
# Types whose objects are not searched
CLOSED = (Tensor, ModuleType, CodeType, FrameType, BuiltinFunctionType, str, bytes, int, float)
Put = Callable[[Any], None]
Child = tuple[Any, Put | None]  # an object, and what replaces it in its holder; None if nothing can


def is_scripts(path: str) -> bool:
    """True if a source file is the user's own: not installed, and not one like ``<string>``."""
    return not (path.startswith("<") or is_installed(path))


def is_a(value: Any, kinds: Any) -> bool:
    """Answer as ``isinstance`` without asking the value for its class, which a proxy computes."""
    return issubclass(type(value), kinds)


def module_name(kind: type) -> str:
    """Return the name of a class's module; empty if a descriptor is in its place.

    Cython (3.2 and later) has such a metaclass, to which a search gets from any compiled function.
    """
    name: Any = kind.__module__
    return name if isinstance(name, str) else ""


def children_of(holder: Any, kind: type) -> list[Child]:
    """Return the objects that another one holds, each with what replaces it there."""
    if issubclass(kind, dict):
        pairs = reversed(dict.items(holder)) if len(holder) > LONG else dict.items(holder)
        return [(v, functools.partial(setitem, holder, k)) for k, v in islice(pairs, LONG)]
    if issubclass(kind, list | deque):
        begin = max(0, len(holder) - LONG)
        items = list(islice(holder, begin, None))
        return [(v, functools.partial(setitem, holder, i)) for i, v in enumerate(items, begin)]
    if issubclass(kind, tuple | set | frozenset):
        return [(value, None) for value in islice(holder, LONG)]
    if kind is CellType:
        return _attributes(holder, ["cell_contents"])
    if kind is FunctionType:
        return _of_function(holder)
    if kind is MethodType:
        return [(part, None) for part in (holder.__self__, holder.__func__)]
    if kind is functools.partial:
        return [(part, None) for part in (holder.func, holder.args, holder.keywords)]
    if kind is GeneratorType:
        return [(value, None) for value in gc.get_referents(holder)]
    if issubclass(kind, type):
        module = sys.modules.get(holder.__module__)
        scripts = is_scripts(getattr(module, "__file__", None) or "<")
        # Not what Python's copy module notes on a class, which is copied in a trial.
        own = [name for name in vars(holder) if name != "__slotnames__"]
        bases: list[Child] = [(base, None) for base in holder.__bases__]
        return [*bases, *_attributes(holder, own)] if scripts else bases
    return [] if module_name(kind).startswith("fasttrain.") else _inside(holder)


def _of_function(function: FunctionType) -> list[Child]:
    if is_shim_code(function.__code__):  # a wrapper of ours around a function of torch's
        return []
    own = (function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function))
    found: list[Child] = [(part, None) for part in own if part is not None]
    scripts = is_scripts(function.__code__.co_filename)
    return [*found, (function.__globals__, None)] if scripts else found


def more_children_of(holder: Any, kind: type) -> list[Child]:
    """Return what `children_of` leaves out: what iterators go through, a container's attributes."""
    if issubclass(kind, dict | list | deque | tuple | set | frozenset):
        return _own(holder) if kind.__flags__ & _HEAP_TYPE else []
    if not kind.__flags__ & _HEAP_TYPE and issubclass(kind, _WAYS_TO_ITEMS):
        return [(value, None) for value in gc.get_referents(holder)]
    return []


def _inside(holder: Any) -> list[Child]:
    """Return the attributes of an object, and its class."""
    return [*_own(holder), (type(holder), None)]


def _own(holder: Any) -> list[Child]:
    try:
        found: list[Child] = [(object.__getattribute__(holder, "__dict__"), None)]
    except AttributeError:
        found = []
    slots = [name for kind in type(holder).__mro__ for name in _slots(kind)]
    return [*found, *_attributes(holder, slots)]


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


def _attributes(holder: Any, names: list[str]) -> list[Child]:
    found: list[Child] = []
    for name in names:
        try:
            value = vars(holder)[name] if is_a(holder, type) else getattr(holder, name)
        except (AttributeError, KeyError, ValueError):  # not set
            continue
        found.append((value, functools.partial(setattr, holder, name)))
    return found


def graph_behind(outputs: Sequence[Any]) -> tuple[set[Any], list[Tensor]]:
    """Return all nodes of the autograd graph of some tensors, and the leaves where it ends.

    Takes 0.5 us a node (one core, torch 2.13).
    """
    begins = [t.grad_fn for t in outputs if isinstance(t, Tensor)]
    nodes: set[Any] = {node for node in begins if node is not None}
    leaves, pending, accumulate = [], list(nodes), _accumulate()
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is None or node in nodes:
                continue
            nodes.add(node)
            if type(node) is accumulate:
                leaves.append(node.variable)
            else:
                pending.append(node)
    return nodes, leaves


@functools.cache
def _accumulate() -> Any:
    """Return the type of the nodes that write gradients to leaves, which has no public name."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        result: Any = torch.zeros(1, requires_grad=True).view(1)
        return type(result.grad_fn.next_functions[0][0])


# Casts tensors inside containers, such as a root's output, to fp32.


Change = Callable[[Tensor], Tensor]


def to_float32(value: Any, dtype: torch.dtype, lift: Change = Tensor.float) -> Any:
    """Return a value with its tensors of ``dtype`` cast to fp32; other tensors stay as they are.

    Args:
        value: A tensor, a container as of `map_tensors`, or anything else.
        dtype: The precision to cast from.
        lift: Casts one tensor of that precision to fp32.
    """
    return map_tensors(value, lambda tensor: lift(tensor) if tensor.dtype is dtype else tensor)


def once(change: Change) -> Change:
    """Return a function that changes a tensor once, and returns the same one for it again.

    So one that a model returns in two places stays one tensor. It is for a single value, whose
    tensors live meanwhile.
    """
    changed: dict[int, Tensor] = {}

    def change_once(tensor: Tensor) -> Tensor:
        key = id(tensor)
        if key not in changed:
            changed[key] = change(tensor)
        return changed[key]

    return change_once


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors inside containers in a fixed order, each as often as it occurs."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def map_tensors(value: Any, change: Change) -> Any:
    """Return a value with ``change`` applied to each tensor in it.

    Containers are tuples, lists, deques, mappings, dataclasses, namespaces and distributions. A
    container in which no tensor changes is returned itself; otherwise it is a new one of its type.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return _map_tuple(value, change)
    if isinstance(value, list | deque):
        return _map_list(value, change)
    if isinstance(value, Mapping):
        return _map_mapping(value, change)
    if holds_by_attributes(value):
        return _map_attributes(value, change)
    return value


def holds_by_attributes(value: Any) -> bool:
    """True for a container whose items are its attributes, such as a dataclass."""
    return isinstance(value, Distribution | SimpleNamespace) or (
        is_dataclass(value) and not isinstance(value, type)
    )


def with_parts(value: Any, parts: Any) -> Any:
    """Return a container like one of those of `map_tensors`, of the same type, with other parts.

    Args:
        value: The container.
        parts: A list of its items, or a dictionary of them or of its attributes by name.
    """
    if isinstance(value, tuple):
        return _tuple_with(value, parts)
    if isinstance(value, list | deque):
        return _list_with(value, parts)
    if isinstance(value, MutableMapping):
        return _mapping_with(value, parts)
    return _object_with(value, parts)


def _same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(map(is_, old, new))


def _map_tuple(value: tuple[Any, ...], change: Change) -> Any:
    items = [map_tensors(item, change) for item in value]
    return value if _same(value, items) else _tuple_with(value, items)


def _tuple_with(value: tuple[Any, ...], items: list[Any]) -> Any:
    kind: Any = type(value)
    if kind in (tuple, torch.Size):
        return kind(items)
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types: max, sort, ...
        return kind(items)
    # Named tuples too. tuple's __new__, because one of their own may take other arguments.
    result = tuple.__new__(kind, items)
    vars(result).update(vars(value)) if hasattr(value, "__dict__") else None
    return result


def _map_list(value: list[Any] | deque[Any], change: Change) -> Any:
    items = [map_tensors(item, change) for item in value]
    return value if _same(value, items) else _list_with(value, items)


def _list_with(value: list[Any] | deque[Any], items: list[Any]) -> Any:
    if type(value) is list:
        return items
    result = copy.copy(value)
    result.clear()
    result.extend(items)
    return result


def _map_mapping(value: Mapping[Any, Any], change: Change) -> Any:
    """Change a mapping's values, by assignment: so HF's ModelOutput updates its attributes too."""
    old = items_of(value)
    items = {key: map_tensors(item, change) for key, item in old.items()}
    if _same(old.values(), items.values()):
        return value
    if not isinstance(value, MutableMapping):
        return value  # a read-only one: what its constructor takes is unknown
    return _mapping_with(value, items)


def _mapping_with(value: MutableMapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    result: Any = _copy_of(value)
    if getattr(value, "__dict__", None) is value:  # its items are its attributes
        result.__dict__ = result
    old = items_of(value)
    for key, item in items.items():
        result[key] = item
    _follow_items(result, {id(old[key]): item for key, item in items.items() if key in old})
    return result


def _copy_of(mapping: Any) -> Any:
    """Return a shallow copy, also of an OrderedDict that isn't made without arguments."""
    try:
        return copy.copy(mapping)
    except TypeError:
        if not isinstance(mapping, OrderedDict):
            raise
    result: Any = OrderedDict.__new__(type(mapping))
    for key, item in mapping.items():
        OrderedDict.__setitem__(result, key, item)
    vars(result).update(vars(mapping))
    return result


def _follow_items(mapping: Any, by_old: dict[int, Any]) -> None:
    """Put new items in attributes that hold the old ones, as dataclasses that are mappings do."""
    attributes = getattr(mapping, "__dict__", None)
    if type(attributes) is dict and attributes is not mapping:
        for name, held in attributes.items():
            if by_old.get(id(held), held) is not held:
                attributes[name] = by_old[id(held)]


def items_of(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a mapping's items; none if one of them can't be read.

    A mapping may compute its values when they are read, and fail at one that the script never
    reads, such as a setting that is still missing.
    """
    try:
        return dict(value.items())
    except Exception:  # noqa: BLE001 - code of the script's or of any package
        return {}


def _map_attributes(value: Any, change: Change) -> Any:
    old = attributes_of(value)
    new = {name: map_tensors(item, change) for name, item in old.items()}
    return value if _same(old.values(), new.values()) else _object_with(value, new)


def _object_with(value: Any, attributes: dict[str, Any]) -> Any:
    result = copy.copy(value)
    for name, item in attributes.items():
        object.__setattr__(result, name, item)  # frozen dataclasses too
    return result


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of such a container by name."""
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    names = [name for name in value.__dataclass_fields__ if hasattr(value, name)]  # slots
    return {name: getattr(value, name) for name in names}
