"""Batches: their signatures, and the state of the samplers that choose them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.hooks.containers import map_tensors, module_name
from fasttrain.shim.process.refusal import refuse
from fasttrain.shim.snapshots.files import NeedsPickleError, packed, refuse_diverged
from fasttrain.shim.snapshots.generators import GENERATORS, generator_state, set_generator
from fasttrain.shim.snapshots.scalar_reads import KEPT_BYTES
from fasttrain.shim.snapshots.script_tensors import merged

# A batch's signature: the shapes of its tensors, and its plain numbers and strings.
#
# A script counts tokens by a shape, or by lengths in a list. So a replayed batch has the
# signature of the batch that it stands for; only the contents of its tensors are another batch's.
# Where shapes change from batch to batch, the contents of short tensors of integers belong to the
# signature: they may be lengths or offsets of parts of the others, which have to fit.


Signature = Any  # a torch.Size for a tensor, a tuple for a container, a plain value for itself

_VALUES = (int, float, bool, type(None), bytes)
ROOM_OF_NUMBERS = 1 << 21  # 16 MiB of pointers, and what the numbers take


def _shape_of(tensor: Tensor) -> Signature:
    return tensor.shape


def signature_of(data: Any, of_tensor: Callable[[Tensor], Signature] = _shape_of) -> Signature:
    """Return a batch's signature, which can be compared and hashed.

    Args:
        data: The batch.
        of_tensor: Returns the signature of a tensor in it.
    """
    if isinstance(data, Tensor):
        return of_tensor(data)
    if type(data) is str:
        return sys.intern(data)  # the same strings come again in every epoch
    if type(data) in _VALUES:
        return data
    if isinstance(data, list | tuple):
        return ("items", *[signature_of(item, of_tensor) for item in data])
    if isinstance(data, Mapping):
        pairs = [(str(key), signature_of(value, of_tensor)) for key, value in data.items()]
        return ("mapping", *pairs)
    return small_array(data) or ("other", type(data).__qualname__)


_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})


class KeptNumbers:
    """Takes short tensors of integers into signatures, up to a total number of integers.

    Attributes:
        full: True once there is no room for more.
    """

    def __init__(self) -> None:
        self._room = ROOM_OF_NUMBERS
        self.full = False

    def signature_of(self, tensor: Tensor) -> Signature:
        """Return the signature of a tensor: its content if it may be lengths or offsets."""
        if tensor.dtype not in _INTEGERS or tensor.dim() != 1 or tensor.device.type != "cpu":
            return tensor.shape
        if tensor.nbytes > KEPT_BYTES:
            return tensor.shape
        self._room -= len(tensor)
        self.full = self.full or self._room < 0
        return tensor.shape if self.full else ("numbers", *tensor.tolist())


def small_array(data: Any) -> tuple[str, str, tuple[int, ...], str] | None:
    """Return the signature of a number or a small array of NumPy's; None of anything else."""
    numpy = sys.modules.get("numpy")
    if not numpy or not isinstance(data, numpy.generic | numpy.ndarray):
        return None
    if data.nbytes > KEPT_BYTES or data.dtype.hasobject:
        return None
    return ("array", data.dtype.str, data.shape, data.tobytes().decode("latin-1"))


def array_again(dtype: str, shape: tuple[int, ...], content: str) -> Any:
    """Return the array whose signature has these parts."""
    numpy = sys.modules["numpy"]  # torch imports it if it is installed
    return numpy.frombuffer(bytearray(content, "latin-1"), dtype).reshape(shape)[()]


def plain_signature(signature: Signature) -> Any:
    """Return a signature in plain types, as a snapshot holds it."""
    if isinstance(signature, torch.Size):
        return ("shape", *signature)
    return tuple(map(plain_signature, signature)) if isinstance(signature, tuple) else signature


def made_like(seen: Any, signature: Any) -> Any:
    """Return a batch with a given signature, whose contents come from a batch that was seen.

    Args:
        seen: The batch that was seen.
        signature: The signature, in plain types.

    Raises:
        SystemExit: ``snapshot-diverged`` if the two have different parts.
    """
    kind = signature[0] if isinstance(signature, tuple) else None
    if kind == "shape" and isinstance(seen, Tensor) and seen.dim() == len(signature) - 1:
        return resized(seen, signature[1:])
    if kind == "numbers" and isinstance(seen, Tensor) and seen.dim() == 1:
        return torch.tensor(signature[1:], dtype=seen.dtype, device=seen.device)
    if kind == "items" and isinstance(seen, list | tuple) and (seen or len(signature) == 1):
        items = [made_like(seen[i % len(seen)], one) for i, one in enumerate(signature[1:])]
        return type(seen)(*items) if hasattr(seen, "_fields") else type(seen)(items)
    if kind == "mapping" and isinstance(seen, Mapping) and len(seen) == len(signature) - 1:
        made: Any = copy.copy(seen)
        for key, (_, one) in zip(seen, signature[1:], strict=True):
            made[key] = made_like(seen[key], one)
        return made
    if kind == "other":
        return map_tensors(seen, Tensor.clone)
    if kind == "array":
        return array_again(*signature[1:])
    if kind is not None or isinstance(seen, Tensor | list | tuple | Mapping):
        refuse_diverged("a DataLoader yields a batch with other parts than then")
    return signature


def resized(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a copy, cut or repeated to a shape; a copy, as the script may change it in place."""
    if tensor.shape == shape:
        return tensor.clone()
    for dim, size in enumerate(shape):
        if tensor.size(dim) != size:
            there = torch.arange(size, device=tensor.device) % max(tensor.size(dim), 1)
            if size and not tensor.size(dim):
                return tensor.new_zeros(shape)
            tensor = tensor.index_select(dim, there)
    return tensor


# The state of a DataLoader's samplers: their own generators, epoch numbers, weights, orders.


OwnStates = dict[str, dict[str, tuple[str, Any]]]  # (kind, value) by name, by owner

_DEEPEST = 4  # levels: a batch sampler that holds a sampler that holds a schedule has 3


def own_states(loader: DataLoader[Any] | None) -> OwnStates:
    """Return the states of a loader and its samplers; empty if the loader is gone.

    Raises:
        SystemExit: ``snapshot-order`` if a sampler holds an iterator: its position is unknown.
    """
    if loader is None:
        return {}
    for name in ("batch_sampler", "sampler"):
        _state_of(name, getattr(loader, name))
    states: OwnStates = {"loader": _states_of({"generator": loader.generator}, loader)}
    for where, owner in _owners(loader):
        states[where] = _states_of(_kept_by(owner), loader)
    return states


def set_own_states(loader: DataLoader[Any] | None, states: OwnStates) -> None:
    """Restore the result of `own_states` into the present objects."""
    if loader is None:
        return
    _set({"generator": loader.generator}, states.get("loader", {}), {})
    for where, owner in _owners(loader):
        if where in states:
            _set(vars(owner), states[where], _states_of(_kept_by(owner), loader))


def without_generators(states: OwnStates) -> OwnStates:
    """Return the states other than those of generators."""
    return {
        where: {name: one for name, one in of.items() if one[0] not in GENERATORS}
        for where, of in states.items()
    }


def is_torchs(sampler: Any) -> bool:
    """True if it is one of torch's samplers, which draw the whole order before the first item."""
    return type(sampler).__module__.startswith("torch.")


def draws_by_torch(loader: DataLoader[Any]) -> bool:
    """True if the order of its batches is drawn from torch's generator, or its own, alone."""
    stock = is_torchs(loader.batch_sampler) and is_torchs(loader.sampler)
    return stock and not isinstance(loader.dataset, IterableDataset)


def _owners(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    seen = {id(loader.dataset), id(loader)}
    for name in ("batch_sampler", "sampler"):
        yield from _below(getattr(loader, name), name, _DEEPEST, seen)


def _below(owner: Any, where: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if not depth or id(owner) in seen or not _is_owner(owner):
        return
    seen.add(id(owner))
    yield where, owner
    for name, value in list(vars(owner).items()):
        yield from _below(value, f"{where}.{name}", depth - 1, seen)


def _is_owner(value: Any) -> bool:
    """True if it is a sampler or an object of the script that one may hold, but not data."""
    if isinstance(value, Dataset | Module | DataLoader | type) or not hasattr(value, "__dict__"):
        return False
    package = module_name(type(value)).partition(".")[0]
    known = package in sys.stdlib_module_names | {"torch", "numpy"}
    return isinstance(value, Sampler) or not (known or hasattr(value, "__getitem__"))


# The script's code sets all of their attributes, which never change, except for the generator.
_FIXED = (RandomSampler, SequentialSampler, BatchSampler)


def _kept_by(owner: Any) -> dict[str, Any]:
    fixed = type(owner) in _FIXED
    return {k: v for k, v in vars(owner).items() if k == "generator"} if fixed else vars(owner)


def _states_of(attributes: dict[str, Any], loader: DataLoader[Any]) -> dict[str, tuple[str, Any]]:
    states = {}
    for name, value in attributes.items():
        if value is not loader.dataset and (state := _state_of(name, value)) is not None:
            states[name] = state
    return states


def _state_of(name: str, value: Any) -> tuple[str, Any] | None:
    """Return a value's kind and its present state; None if it has no known state."""
    if (found := generator_state(value)) is not None:
        return found
    try:
        packed(value)
    except NeedsPickleError as error:
        if not _is_owner(value) and issubclass(error.kind, Iterator):
            refuse(_unfollowable(name, error.kind))
        return None
    if isinstance(value, Tensor):
        return "tensor", value.detach().clone()
    return "plain", list(value) if type(value) is list else copy.deepcopy(value)


def _set(
    attributes: dict[str, Any],
    states: dict[str, tuple[str, Any]],
    now: dict[str, tuple[str, Any]],
) -> None:
    for name, (kind, state) in states.items():
        if kind in GENERATORS:
            set_generator(attributes[name], (kind, state))
        else:
            attributes[name] = merged(attributes.get(name), copy.deepcopy(state))
    for name in now.keys() - states.keys():  # attributes that reading has added
        del attributes[name]


def _unfollowable(name: str, kind: type) -> FasttrainError:
    return FasttrainError(
        "--preempt snapshot can't follow a sampler",
        why=f"it holds a {kind.__qualname__} ({name}), whose position can't be determined",
        fix="draw the order in the sampler's __iter__, or use --preempt signal and the script's own"
        " checkpoints",
        slug="snapshot-order",
    )
