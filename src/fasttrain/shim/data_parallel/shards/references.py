"""Puts shards where the script keeps the whole parameters that they were made of."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import CellType, FrameType, GeneratorType, MemberDescriptorType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fasttrain.shim.data_parallel.shards.checkpoints import cut_like
from fasttrain.shim.data_parallel.shards.refusals import hooks_error, kept_error
from fasttrain.shim.hooks.containers import module_name
from fasttrain.shim.process.callsite import own_prefixes
from fasttrain.shim.process.refusal import refuse

_OWN = ("fasttrain.", "torch.distributed.")  # modules whose objects know of shards


def exchange_states(optimizer: Optimizer, places: dict[int, Any]) -> None:
    """Shard an optimizer's states of whole parameters."""
    for parameter in [p for p in optimizer.state if id(p) in places]:
        shard = places[id(parameter)]
        state = optimizer.state.pop(parameter)
        # The same dictionary: a step of LBFGS, within which the model is called, holds it.
        state.update({k: cut_like(v, shard) for k, v in state.items()})
        optimizer.state[shard] = state


def exchange_hooks(whole: Any, shard: Any) -> None:
    """Have FSDP run the hooks that the script has on a whole parameter.

    It runs those that get the parameter once its gradient is there. Others would be lost.

    Raises:
        SystemExit: ``fsdp-hooks``.
    """
    if whole is shard:
        return
    if whole._backward_hooks:
        refuse(hooks_error())
    # The same mapping, from which the script's handles remove.
    shard._post_accumulate_grad_hooks = whole._post_accumulate_grad_hooks


def exchange_references(whole: list[Tensor], places: dict[int, Any]) -> None:
    """Replace whole parameters by their shards wherever they are kept, such as in an optimizer.

    A script that has listed ``model.parameters()`` before the first call would otherwise clip,
    average or penalise parameters that nobody trains any more.

    Raises:
        SystemExit: ``fsdp-references`` if they are kept where they can't be replaced.
    """
    for holder in gc.get_referrers(*whole):
        if holder is not whole:
            _exchange_in(holder, places)
    for frame in _frames_of_script():
        if frame.f_locals is not frame.f_globals:  # which are a dict like others
            _exchange_in_frame(frame, places)


def _exchange_in(holder: Any, places: dict[int, Any]) -> None:
    """Replace parameters in a container, an object or a generator."""
    if isinstance(holder, list | deque | set):
        _exchange_items(holder, places)
    elif isinstance(holder, dict):
        _exchange_in_dict(holder, places)
    elif isinstance(holder, CellType):
        holder.cell_contents = places[id(holder.cell_contents)]
    elif isinstance(holder, tuple | frozenset):
        refuse(kept_error(type(holder).__name__))
    elif isinstance(holder, GeneratorType):
        if holder.gi_frame is not None:
            _exchange_in_frame(holder.gi_frame, places)
    elif not module_name(type(holder)).startswith(_OWN):
        _exchange_in_attributes(holder, places)


def _exchange_items(holder: Any, places: dict[int, Any]) -> None:
    if isinstance(holder, set):
        kept = [places.get(id(item), item) for item in holder]
        holder.clear()
        holder.update(kept)
        return
    for at, item in enumerate(holder):
        if id(item) in places:
            holder[at] = places[id(item)]


def _exchange_in_attributes(holder: Any, places: dict[int, Any]) -> None:
    """Replace parameters in an object's attributes, which have no dict of their own until asked."""
    for kind in type(holder).__mro__:
        slots = vars(kind).values() if "__slots__" in vars(kind) else ()
        for slot in [each for each in slots if isinstance(each, MemberDescriptorType)]:
            with suppress(AttributeError):  # not set
                value = slot.__get__(holder)
                if id(value) in places:
                    slot.__set__(holder, places[id(value)])
    if type(attributes := getattr(holder, "__dict__", None)) is dict:
        _exchange_in_dict(attributes, places)


def _exchange_in_frame(frame: FrameType, places: dict[int, Any]) -> None:
    """Replace parameters in the local variables of a function that is running."""
    own = frame.f_locals
    names = [name for name, value in own.items() if id(value) in places]
    for name in names:
        own[name] = places[id(own[name])]
    if names and sys.version_info < (3, 13):  # from which on that were the variables themselves
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _exchange_in_dict(holder: dict[Any, Any], places: dict[int, Any]) -> None:
    if any(id(key) in places for key in holder):  # by parameter; the order stays
        items = [(places.get(id(k), k), places.get(id(v), v)) for k, v in holder.items()]
        holder.clear()
        holder.update(items)
        return
    for key, value in holder.items():
        if id(value) in places:
            holder[key] = places[id(value)]


def _frames_of_script() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((*own_prefixes(), "<")):
            yield frame
        frame = frame.f_back
