"""The modules of a root in a trial: hooks on them, what a call changes in them, and randomness."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_, is_not
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributions import distribution
from torch.nn import Module, Parameter
from torch.nn.modules import module as torchs
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.shim.data_parallel.tensor_sums import strided_parts, sums_of
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import module_name, tensors_in
from fasttrain.shim.hooks.roots import is_sharded, parameters_of
from fasttrain.shim.hooks.seams import Hooking

# The script's own hooks on modules: they have to see whole batches.


ALL_MODULES = "all modules"

_OF_MODULES = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_backward_hook",
)  # fmt: skip
_HOOK_SLOTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = tuple(f"_global{slot}" for slot in _HOOK_SLOTS)


class Marks:
    """Counts something that happens to modules, and knows when it last happened to each.

    Attributes:
        count: How often it has happened to any module.
    """

    def __init__(self) -> None:
        self.count = 0
        # By id: a class of the script's may have a hash that fails in its constructor.
        self._last: dict[int, tuple[weakref.ref[Module], int]] = {}

    def note(self, module: Module) -> None:
        """Note that it happens to a module."""
        self.count += 1
        known = self._last.get(id(module))
        ref = known[0] if known is not None else weakref.ref(module, self._forgetting(id(module)))
        self._last[id(module)] = ref, self.count

    def _forgetting(self, key: int) -> Callable[[object], None]:
        last = self._last

        def forget(_: object) -> None:
            last.pop(key, None)

        return forget

    def any_since(self, count: int, modules: Iterable[Module]) -> bool:
        """True if it has happened to one of the modules after it had happened that often."""
        if count == self.count:
            return False
        last = self._last
        return any(id(part) in last and last[id(part)][1] > count for part in modules)


class HookCount:
    """Notes hooks as they are registered, so that a call with new ones is verified again.

    Attributes:
        registered: Marks of modules that a hook was registered on, or a module or parameter.
        moved: Number of modules whose own parameters went to another device or got another dtype.
    """

    def __init__(self) -> None:
        self.registered, self.moved = Marks(), 0

    def install(self, undo: ExitStack) -> None:
        """Wrap the methods that register hooks; use torch's own hooks for new parts of modules."""
        for name in _OF_MODULES:
            patching.wrap(Module, name, self._counted, undo, Hooking.SPLIT)
        patching.wrap(Module, "_apply", self._seen_moving, undo)
        for register in (
            torchs.register_module_module_registration_hook,
            torchs.register_module_parameter_registration_hook,
        ):
            undo.callback(register(self._count).remove)

    def _count(self, owner: Module, name: str, part: Any) -> None:
        known = owner._parameters.get(name, owner._modules.get(name))
        # FSDP assigns whole parameters to a module with a `__setattr__` of its own, such as a
        # recurrent layer, in each call, and the shards after it.
        sharded = any(hasattr(each, "placements") for each in (known, part))
        if not sharded and part is not known:  # a known part was only assigned again
            self.registered.note(owner)

    def _counted(self, original: Any) -> Any:
        @functools.wraps(original)
        def register(module: Module, *args: Any, **kwargs: Any) -> Any:
            self.registered.note(module)
            return original(module, *args, **kwargs)

        return register

    def _seen_moving(self, original: Any) -> Any:
        @functools.wraps(original)
        def apply(module: Module, *args: Any, **kwargs: Any) -> Any:
            before = _kinds(module)
            try:
                return original(module, *args, **kwargs)
            finally:
                self.moved += _kinds(module) != before

        return apply


def _kinds(module: Module) -> list[Any]:
    return [(p.dtype, p.device) for p in module._parameters.values() if p is not None]


def foreign_hook(module: Module) -> str:
    """Return the class of the first module with a hook of the script's; empty if there is none."""
    for name in _GLOBAL:
        if any(map(_is_foreign, getattr(torchs, name).values())):
            return ALL_MODULES
    parts = (part for part in Module.modules(module) if any(map(_is_foreign, _hooks(part))))
    return next((type(part).__name__ for part in parts), "")


def _hooks(part: Module) -> Iterator[Any]:
    for slot in _HOOK_SLOTS:
        yield from getattr(part, slot).values()


def _is_foreign(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return not home.startswith("torch.")


# What a call changes in a root's modules: attributes, buffers and values of parameters.


# A module's own containers; their contents are compared separately.
_SLOTS = frozenset({"_parameters", "_buffers", "_modules"})
Draw = tuple[str, tuple[int, ...]]  # an operator that draws, and the shape of what it draws
Place = tuple[int, str]  # the number of a module in the order of `Module.modules`, and a name
IN_DOUBLE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)


class ModuleState:
    """Attributes and buffers of a root's modules at one moment.

    Attributes:
        parts: The modules.
    """

    def __init__(self, module: Module) -> None:
        self.parts = list(Module.modules(module))
        self._attributes = [dict(vars(part)) for part in self.parts]
        self._parameters = [dict(part._parameters) for part in self.parts]
        self._slots = [dict(part._buffers) for part in self.parts]
        with torch.no_grad():
            self._values = [{k: _clone(b) for k, b in slot.items()} for slot in self._slots]
        self._begun = [_versions_of(slot) for slot in self._slots]

    def left(self) -> dict[Place, Any]:
        """Return the attributes and buffers that were replaced or, for buffers, written to."""
        found: dict[Place, Any] = {}
        for number, part in enumerate(self.parts):
            before = self._attributes[number]
            for name, value in vars(part).items():
                if name not in _SLOTS and before.get(name, _SLOTS) is not value:
                    found[number, name] = value
            values, begun = self._values[number], self._begun[number]
            for name, buffer in part._buffers.items():
                # Also one that has the same values after it, such as a count of rare rows.
                written = _version_of(buffer) != begun.get(name)
                if written or not _alike(buffer, values.get(name)):
                    found[number, name] = buffer
        return found

    def has_grown(self, module: Module) -> bool:
        """True if the root has other modules or parameters now."""
        parts = list(Module.modules(module))
        if len(parts) != len(self.parts) or any(map(is_not, parts, self.parts)):
            return True
        held = zip(self.parts, self._parameters, strict=True)
        return any(part._parameters.keys() != before.keys() for part, before in held)

    def begin(self) -> None:
        """Restore the attributes, and put copies of the buffers' values in the buffers' places.

        The buffers themselves aren't written to: autograd graphs may need them.
        """
        for part, attributes, values in zip(
            self.parts, self._attributes, self._values, strict=True
        ):
            _set(vars(part), attributes)
            with torch.no_grad():
                _set(part._buffers, {name: _clone(value) for name, value in values.items()})
        self._begun = [_versions_of(part._buffers) for part in self.parts]

    @contextmanager
    def in_double(self, module: Module) -> Iterator[None]:
        """Put copies in fp64 in the places of parameters, and of buffers at each `begin`."""
        held = [(part, dict(part._parameters)) for part in Module.modules(module)]
        values = self._values
        copies: dict[int, Parameter] = {}

        def doubled(parameter: Parameter | None) -> Parameter | None:
            if parameter is None or parameter.dtype not in IN_DOUBLE:
                return parameter
            if id(parameter) not in copies:
                copy = parameter.detach().to(torch.float64)
                copies[id(parameter)] = Parameter(copy, parameter.requires_grad)
            return copies[id(parameter)]

        try:
            self._values = [{k: _in_double(b) for k, b in slot.items()} for slot in values]
            for part, slot in held:
                part._parameters.update({name: doubled(p) for name, p in slot.items()})
            yield
        finally:
            for part, slot in held:
                part._parameters.update(slot)
            self._values = values

    def put(self) -> None:
        """Restore the attributes and the buffers themselves."""
        for part, attributes, slot in zip(self.parts, self._attributes, self._slots, strict=True):
            _set(vars(part), attributes)
            _set(part._buffers, slot)


class Changes:
    """What a split call changes in its modules, and whether verified calls have changed that.

    Looked at are buffers, parameters, and attributes of modules but those of torch's own classes.

    Args:
        module: The root.
        changed: The attributes and buffers that such calls change.
        kept: The attributes among them in which they leave tensors; True if these have rows.
    """

    def __init__(
        self, module: Module, changed: Sequence[Place], kept: Mapping[Place, bool] | None = None
    ) -> None:
        self._changed, self._kept = frozenset(changed), kept or {}
        self._rows = {place for place, rows in self._kept.items() if rows}
        parts, numbers = list(Module.modules(module)), {number for number, _ in changed}
        self._parts: list[tuple[int, weakref.ref[Module]]] = []
        self._fixed: list[weakref.ref[Tensor]] = []
        for number, part in enumerate(parts):
            if number in numbers or not _is_torchs(part):
                self._parts.append((number, weakref.ref(part)))
            else:
                self._fixed += [weakref.ref(b) for b in part._buffers.values() if _is_counted(b)]
        if not is_sharded(module):
            self._fixed += [weakref.ref(p) for p in parameters_of(module) if _is_counted(p)]

    def hold(self) -> Held:
        """Return the present state, of which restorable buffers are copied."""
        held = Held(self._changed, self._kept, self._rows)
        for number, ref in self._parts:
            if (part := ref()) is not None:
                held.add(number, part)
        held.fixed += [t for ref in self._fixed if (t := ref()) is not None]
        held.copy()
        return held


MOST_COPIED = 1 << 16  # numbers in a buffer that is copied though no verified call writes to it


class Held:
    """The state of a root's modules before a split call.

    Attributes:
        fixed: Tensors that can't be restored.
    """

    def __init__(
        self, changed: frozenset[Place], kept: Mapping[Place, bool], rows: set[Place]
    ) -> None:
        self.fixed: list[Tensor] = []
        self._changed, self._kept, self._rows = changed, kept, rows
        self._parts: list[tuple[int, Module, dict[str, Any], dict[str, Any]]] = []
        self._copied: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._versions: list[int] = []
        self._begun: list[dict[str, tuple[int, int]]] = []

    def add(self, number: int, part: Module) -> None:
        """Hold the attributes and buffers of a module, which has that number in its root."""
        buffers = part._buffers
        self._parts.append((number, part, vars(part).copy(), buffers.copy()))
        self._begun.append(_versions_of(buffers) if buffers else {})
        for name, buffer in buffers.items():
            if buffer is None or is_lazy(buffer):
                continue
            if (number, name) in self._changed or buffer.numel() <= MOST_COPIED:
                self._copied.append(buffer)
            elif _is_counted(buffer):
                self.fixed.append(buffer)

    def copy(self) -> None:
        """Copy the buffers."""
        alike: dict[Any, list[Tensor]] = {}
        for buffer in self._copied:
            alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._copied = [buffer for same in alike.values() for buffer in same]
        with torch.no_grad():  # on a device by one kernel for all of a dtype
            self._copies = [c for same in alike.values() for c in torch._foreach_mul(same, 1)]
        self._versions = [tensor._version for tensor in self.fixed]

    def has_lost(self) -> bool:
        """True if the call has written to a tensor that can't be restored."""
        return self._versions != [tensor._version for tensor in self.fixed]

    def is_foreseen(self) -> bool:
        """True if verified calls have changed all that the call has changed."""
        found: set[Place] = set()
        for (number, part, before, _), begun in zip(self._parts, self._begun, strict=True):
            now = vars(part)
            if len(now) != len(before) or not all(map(is_, now.values(), before.values())):
                for name, value in now.items():
                    if name in _SLOTS or before.get(name, _SLOTS) is value:
                        continue
                    found.add((number, name))
                    if (number, name) not in self._kept and tensors_in(value):
                        return False
            if begun and begun != (versions := _versions_of(part._buffers)):
                found |= {(number, n) for n, at in versions.items() if begun.get(n) != at}
        return found <= self._changed and self._rows <= found

    def buffers(self) -> list[Tensor]:
        """Return the buffers that such calls write to, but BatchNorm's, which sums over ranks."""
        return [
            buffer
            for number, part, *_ in self._parts
            for name, buffer in part._buffers.items()
            if (number, name) in self._changed
            and buffer is not None
            and not isinstance(part, _BatchNorm)
        ]

    def restore(self) -> None:
        """Restore attributes and buffers."""
        for _, part, attributes, buffers in self._parts:
            _set(vars(part), attributes)
            _set(part._buffers, buffers)
        for buffer, copy in zip(self._copied, self._copies, strict=True):
            # No new version of it: autograd graphs of other calls may hold it.
            buffer.data.copy_(copy)


def _is_torchs(part: Module) -> bool:
    """True if all classes of a module are torch's: FSDP and parametrizations make new ones."""
    return all(module_name(kind).startswith("torch.") for kind in type(part).__mro__[:-1])


def _is_counted(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """True if a tensor counts what is written to it."""
    return tensor is not None and not is_lazy(tensor) and not tensor.is_inference()


def parameter_sums(module: Module) -> list[float]:
    """Return checksums of all parameters, or of this rank's shards.

    A copy to compare with would double the parameters' memory.
    """
    return sums_of([p for p in parameters_of(module) if not is_lazy(p)])


def _set(slot: dict[str, Any], values: dict[str, Any]) -> None:
    for name in slot.keys() - values.keys():
        del slot[name]
    slot.update(values)


def _in_double(buffer: Tensor | None) -> Tensor | None:
    if buffer is None or is_lazy(buffer):
        return buffer
    return buffer.to(IN_DOUBLE.get(buffer.dtype, buffer.dtype))


def _versions_of(slot: dict[str, Tensor | None]) -> dict[str, tuple[int, int]]:
    return {name: _version_of(tensor) for name, tensor in slot.items()}


def _version_of(tensor: Tensor | None) -> tuple[int, int]:
    """Return what is another one once a tensor has been replaced or written to."""
    return id(tensor), tensor._version if _is_counted(tensor) else 0


def _clone(buffer: Tensor | None) -> Tensor | None:
    return buffer if buffer is None or is_lazy(buffer) else buffer.detach().clone()


def _alike(buffer: Tensor | None, before: Tensor | None) -> bool:
    if buffer is None or before is None or is_lazy(buffer):
        return buffer is before
    if buffer.layout != before.layout or buffer.dtype != before.dtype:
        return False
    now, then = strided_parts(buffer), strided_parts(before)
    return all(map(torch.equal, now, then))


# Runs a model without randomness, so that two calls of it can be compared.
#
# Every operator that draws random numbers returns a constant for each element instead: a dropout
# keeps everything, noise is constant. A model's results then don't depend on the number of rows,
# unless the rows depend on each other.
#
# Source: operators with ``torch.Tag.nondeterministic_seeded`` of torch 2.13.


_MASKS = (torch.bool, torch.uint8)
_ORDERS = ("randperm", "multinomial")
_INTEGERS = ("randint", "randint_like", "random_")
_MODE: Any = TorchDispatchMode  # without annotations
_READING: Any = torch.ops.aten._local_scalar_dense.default
_WRAPPERS = tuple(str(Path(torch.__file__).with_name(name)) for name in ("_compile.py", "_dynamo"))
MOST_DRAWS = 100_000  # a loop that draws until it gets another number would not end


class NotNeutralError(Exception):
    """Raised if an operator draws random numbers and has no constant to replace them."""


class Neutral(_MODE):  # type: ignore[misc]
    """Dispatch mode that replaces random numbers by constants.

    Args:
        known: Tensors that Python may read, since they don't depend on the rows.
        otherwise: Use other constants, to see which results depend on them.
        place: Use constants from this place of the range of a draw, from 0 to 1, in every other
            element along a dimension, so that a branch is taken which is unlikely.
        along: The dimension for each draw; None for all elements.

    Attributes:
        reads: True if Python has read a number of any other tensor, such as to branch on it.
        by_values: True if a shape depended on values: a submodule may get no row at all.
        drawn: The operators that drew random numbers, each with the shape of these.
    """

    def __init__(
        self,
        known: Iterable[Tensor] = (),
        *,
        otherwise: bool = False,
        place: float | None = None,
        along: Sequence[int | None] = (),
    ) -> None:
        super().__init__()
        self.reads = self.by_values = False
        self.drawn: list[Draw] = []
        self._known = {id(tensor) for tensor in known}
        self._otherwise = otherwise
        self._place, self._along = place, along

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        if func is _READING and id(args[0]) not in self._known:
            self.reads |= not _is_check(args[0])
        if torch.Tag.dynamic_output_shape in func.tags and _by_values(func, args):
            self.by_values = True
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        with_p = any(argument.name == "dropout_p" for argument in func._schema.arguments)
        if not with_p and name not in _CONSTANTS:
            # In inference mode operators come here that are elsewhere seen as those they consist
            # of: a dropout in evaluation consists of none.
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return self._drawn_by(func, name, _named(func, args, kwargs), with_p=with_p)

    def _drawn_by(self, func: Any, name: str, named: dict[str, Any], *, with_p: bool) -> Any:
        """Return constants instead of what an operator draws."""
        number = len(self.drawn)
        self.drawn.append((name, ()))
        if number == MOST_DRAWS:
            raise NotNeutralError(f"{name} was called more than {MOST_DRAWS:,} times")
        if with_p:
            return func(**named | {"dropout_p": 0.0})
        constant = _CONSTANTS.get(name)
        if constant is None:
            raise NotNeutralError(f"{name} draws random numbers")
        given = constant(func, named)
        if isinstance(given, Tensor):
            self.drawn[number] = name, tuple(given.shape)
        if self._place is not None and name in _PLACES:
            dim = self._along[number] if number < len(self._along) else None
            _put_at(given, _PLACES[name](given, named, self._place), dim)
        return _other(name, given, named) if self._otherwise else given


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_check(tensor: Tensor) -> bool:
    """True if torch reads whether the arguments of a distribution are valid, and they are.

    They are for all rows exactly if they are for each rank's. Otherwise it raises an error.
    """
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_WRAPPERS):  # of each dispatch mode
        frame = frame.f_back
    return frame.f_code.co_filename == distribution.__file__ and bool(tensor.all())


def _by_values(func: Any, args: tuple[Any, ...]) -> bool:
    """True if the shape of an operator's result depends on values of its arguments."""
    if func._schema.name != "aten::index":
        return True
    return any(index is not None and index.dtype in _MASKS for index in args[1])


def _other(name: str, given: Any, named: dict[str, Any]) -> Any:
    """Return different constants of the same kind."""
    if isinstance(given, tuple):
        return (_other(name, given[0], named), *given[1:])
    if name in _ORDERS:
        return given.copy_(given.flip(-1))
    if name in _INTEGERS:
        return given.fill_((named.get("high") or named.get("to") or 2) - 1)
    if not given.is_floating_point():
        return given.logical_not_()
    every_other = torch.arange(given.numel(), device=given.device).view(given.shape) % 2
    return given.mul_(0.5 + 0.25 * every_other)  # not all equal: a softmax would cancel that


def along_which(whole: Sequence[Draw], part: Sequence[Draw]) -> list[int | None]:
    """Return for each draw of a call the last dimension that isn't of rows; None without any.

    Args:
        whole: What the whole call has drawn.
        part: What the call with a part of the batch has drawn.
    """
    return [_along_which(*pair) for pair in zip(whole, part, strict=False)]


def _along_which(whole: Draw, part: Draw) -> int | None:
    (name, sizes), (other, own) = whole, part
    if name != other or len(sizes) != len(own):
        return None
    same = [dim for dim, size in enumerate(sizes) if size == own[dim] and size > 1]
    return same[-1] if same else None


def has_place(drawn: Iterable[Draw], place: float) -> bool:
    """True if a place in the range makes a difference for a draw."""
    names = {name for name, _ in drawn} & _PLACES.keys()
    return bool(names if place > 0.5 else names - _LOW)


def _put_at(given: Tensor, there: Any, dim: int | None) -> None:
    """Replace a draw's constants; with a dimension, those of every other element along it."""
    there = torch.as_tensor(there, device=given.device).expand(given.shape)
    if dim is not None:
        odd = torch.arange(given.size(dim), device=given.device) % 2 == 1
        there = torch.where(odd.view(-1, *(1,) * (given.dim() - dim - 1)), given, there)
    given.copy_(there)


def _filled(value: float) -> Callable[[Any, dict[str, Any]], Any]:
    """Return a replacement that fills a tensor with one number, as a factory or in place."""

    def fill(func: Any, given: dict[str, Any]) -> Any:
        like = given.get("self")
        if func._schema.name.endswith("_") and isinstance(like, Tensor):
            return like.fill_(value)
        options = {k: given[k] for k in ("dtype", "device") if given.get(k) is not None}
        if isinstance(like, Tensor):
            return torch.full_like(like, value, **options)
        options.setdefault("dtype", torch.get_default_dtype())
        return torch.full(given["size"], value, **options)

    return fill


def _between(func: Any, given: dict[str, Any]) -> Any:
    middle = (given.get("from", 0.0) + given.get("to", 1.0)) / 2
    return _filled(middle)(func, given)


def _normal(func: Any, given: dict[str, Any]) -> Any:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    if isinstance(mean, Tensor) or isinstance(std, Tensor):
        return mean + 0.5 * std
    if isinstance(given.get("self"), Tensor) and not func._schema.name.endswith("_"):
        raise NotNeutralError("normal draws random numbers")
    return _filled(mean + 0.5 * std)(func, given)


def _integers(func: Any, given: dict[str, Any]) -> Any:
    low = given.get("low", given.get("from") or 0)
    if isinstance(given.get("self"), Tensor):
        return _filled(low)(func, given)
    return _filled(low)(func, {"dtype": torch.int64, **given})


def _permutation(_: Any, given: dict[str, Any]) -> Any:
    # Reversed, not the identity: a permutation of rows must show in the results.
    return torch.arange(given["n"] - 1, -1, -1, device=given.get("device"))


def _keeping(_: Any, given: dict[str, Any]) -> Any:
    whole = given["input"]
    return whole.clone(), torch.ones_like(whole, dtype=torch.bool)


def _likelier(_: Any, given: dict[str, Any]) -> Any:
    chance = given["self"]
    return (chance > 0.5).to(chance.dtype)


def _likeliest(_: Any, given: dict[str, Any]) -> Any:
    return given["self"].topk(given["num_samples"], dim=-1).indices


def _in_cudnn(func: Any, given: dict[str, Any]) -> Any:
    return func(**given | {"dropout": 0.0})


_CONSTANTS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "bernoulli": _likelier,
    "bernoulli_": _filled(1.0),
    "exponential_": _filled(1.0),
    "multinomial": _likeliest,
    "native_dropout": _keeping,
    "normal": _normal,
    "normal_": _normal,
    "rand": _filled(0.5),
    "rand_like": _filled(0.5),
    "randint": _integers,
    "randint_like": _integers,
    "randn": _filled(0.5),
    "randn_like": _filled(0.5),
    "random_": _integers,
    "randperm": _permutation,
    "uniform_": _between,
    "_cudnn_rnn": _in_cudnn,
}


def _at_place(_: Tensor, named: dict[str, Any], place: float) -> Any:
    low, high = named.get("from", 0.0), named.get("to", 1.0)
    return low + (high - low) * place


def _chosen(_: Tensor, named: dict[str, Any], place: float) -> Any:
    chance = named.get("p", named["self"])
    return chance > place


def _kept(_: Tensor, named: dict[str, Any], place: float) -> Any:
    chance: Any = named.get("p", 0.5)
    return chance > place


def _deviating(given: Tensor, named: dict[str, Any], place: float) -> Any:
    return given + (-2.0 if place < 0.5 else 1.0) * named.get("std", 1.0)


def _waited(_: Tensor, __: dict[str, Any], place: float) -> Any:
    return -math.log1p(-place)


def _integer(given: Tensor, named: dict[str, Any], place: float) -> Any:
    high = named.get("high") or named.get("to")
    return given if place < 0.5 or high is None else high - 1


# Those whose usual constants are those of a low place.
_LOW = {"bernoulli_", "randint", "randint_like", "random_"}
# Other constants for a place in the range, of those draws on which a branch may depend.
_PLACES: dict[str, Callable[[Tensor, dict[str, Any], float], Any]] = {
    "bernoulli": _chosen,
    "bernoulli_": _kept,
    "exponential_": _waited,
    "normal": _deviating,
    "normal_": _deviating,
    "rand": _at_place,
    "rand_like": _at_place,
    "randint": _integer,
    "randint_like": _integer,
    "randn": _deviating,
    "randn_like": _deviating,
    "random_": _integer,
    "uniform_": _at_place,
}
