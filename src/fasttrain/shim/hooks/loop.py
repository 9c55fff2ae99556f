"""Notices events of the training loop: batches, backward passes, closures, training mode."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS, Optimizer
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.roots import Root, RootCalls, parameters_of
from fasttrain.shim.hooks.seams import Training, then

# Notices each batch that a DataLoader returns.
#
# A descriptor takes the place of its iterators' counter. A wrapper around ``__next__`` would put
# a frame of fasttrain's into the traceback of a batch that can't be read.


LENT = "_fasttrain_lent"  # an attribute of a DataLoader while workers are lent to it
_COUNTER = "_num_yielded"  # of DataLoader iterators from torch 1.4 on
Listen = Callable[[Any, Any], None]


def on_batch(listen: Listen, undo: ExitStack) -> None:
    """Call ``listen`` for each batch, with the iterator and what it is about to return."""
    counter = vars(_BaseDataLoaderIter).get(_COUNTER)
    if not isinstance(counter, _Counter):
        for function in (_Counter.__get__, _Counter.__set__):
            pass_over(function, all_it_calls=True)
        counter = _Counter()
        gone = ExitStack()
        patching.put(_BaseDataLoaderIter, _COUNTER, counter, gone)
        counter.gone = gone.close
    counter.listeners.append(listen)
    undo.callback(counter.leave, listen)


class _Counter:
    """Holds the count of each iterator in the iterator itself."""

    def __init__(self) -> None:
        self.listeners: list[Listen] = []
        self.gone: Callable[[], None] = lambda: None  # takes it away again

    def leave(self, listen: Listen) -> None:
        self.listeners.remove(listen)
        if not self.listeners:
            self.gone()

    def __get__(self, iterator: Any, owner: Any) -> Any:
        return self if iterator is None else vars(iterator)[_COUNTER]

    def __set__(self, iterator: Any, value: int) -> None:
        vars(iterator)[_COUNTER] = value
        if not value:
            return  # the iterator is new, or begins another epoch
        # A local variable of __next__, up to torch 2.13; None if another version renames it.
        data = sys._getframe(1).f_locals.get("data")
        for listen in self.listeners:
            listen(iterator, data)


# Knows how long an epoch is, where that can be asked without running code of the script's that
# torch wouldn't run: a sampler may draw random numbers to count what it yields.


_SIZED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler,
          DistributedSampler, list, tuple, range)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Epoch:
    """What a DataLoader reads in one epoch.

    Attributes:
        samples: How many the sampler yields.
        batch_size: Samples of a batch, but for the last one; 0 if torch doesn't put them together.
        batches: How many the loader returns.
    """

    samples: int
    batch_size: int
    batches: int


_EPOCHS: weakref.WeakKeyDictionary[Any, Epoch | None] = weakref.WeakKeyDictionary()


def known_epoch(iterator: Any) -> Epoch | None:
    """Return what a DataLoader's iterator reads; None if it isn't known.

    torch's own samplers alone are asked, and once for each iterator: they may ask the script's
    dataset, as they do when the iterator begins.
    """
    known = _EPOCHS.get(iterator, ...)
    if known is ...:
        known = None
        with suppress(Exception):  # a __len__ of the script's may raise anything
            known = _epoch(iterator._index_sampler)
        _EPOCHS[iterator] = known
    return known


def _epoch(sampler: Any) -> Epoch | None:
    size, batches = 0, type(sampler) is BatchSampler
    if batches:
        size, drop_last, sampler = sampler.batch_size, sampler.drop_last, sampler.sampler
    if type(sampler) not in _SIZED:
        return None
    samples = len(sampler)
    if not batches:
        return Epoch(samples, 0, samples)
    return Epoch(samples, size, samples // size if drop_last else -(-samples // size))


# Notices when the script calls ``backward()`` on a tensor.
#
# A descriptor in place of ``Tensor.backward`` sees the attribute lookup and returns torch's own
# method. A wrapper would put a frame of fasttrain's into every traceback of a backward pass.


See = Callable[[Tensor, CodeType, int], None]


def on_backward(see: See, undo: ExitStack) -> None:
    """Call ``see`` before each call of ``backward`` with the tensor and the caller's instruction.

    A lookup counts as a call. Lookups inside a function that torch.compile traces are not reported.
    """
    backward = vars(Tensor)["backward"]
    if not isinstance(backward, _Backward):
        pass_over(_Backward.__get__, all_it_calls=True)
        gone = ExitStack()
        backward = patching.wrap(Tensor, "backward", _Backward, gone)
        backward.gone = gone.close
    backward.listeners.append(see)
    undo.callback(backward.leave, see)


class _Backward:
    """A descriptor in place of ``Tensor.backward`` that returns torch's method."""

    def __init__(self, torchs: Any) -> None:
        self.torchs = torchs
        self.listeners: list[See] = []
        self.gone: Callable[[], None] = lambda: None  # puts torch's back

    def leave(self, see: See) -> None:
        self.listeners.remove(see)
        if not self.listeners:
            self.gone()

    def __get__(self, tensor: Tensor | None, owner: type[Tensor]) -> Any:
        if tensor is None:
            return self.torchs
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1)
            for see in self.listeners:
                see(tensor, caller.f_code, caller.f_lasti)
        return self.torchs.__get__(tensor, owner)


# Closures that scripts pass to ``Optimizer.step``, which compute the gradients.


Closure = Callable[[], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure among the arguments of a step, the optimizer being the first of them."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def begins_with_closure(optimizer: Optimizer) -> bool:
    """True if an optimizer's step calls its closure once, before anything else.

    torch's own optimizers do, except for L-BFGS. Others, such as SAM, may not.
    """
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS)


def followed(args: tuple[Any, ...], kwargs: dict[str, Any], after: Closure) -> Arguments:
    """Return a step's arguments with a closure that calls ``after`` at its end."""
    closure: Any = closure_of(args, kwargs)

    def call() -> Any:
        result = closure()
        after()
        return result

    if len(args) > 1:
        return (args[0], call, *args[2:]), kwargs
    return args, {**kwargs, "closure": call}


# Finds whether the script is training or evaluating at the moment.


NO_GRADIENTS = "read without gradients"
NO_OPTIMIZER = "read before there is an optimizer"
IN_EVAL = "read while the model is in eval mode"


class TrainingState:
    """Follows the optimizers, and the modules that are in training mode.

    Attributes:
        made: Number of optimizers constructed so far.
        on_made: Called with each optimizer once it is constructed.
        on_zero_grad: Called after gradients were cleared.
    """

    def __init__(self, roots: RootCalls) -> None:
        self._roots = roots
        self.made = 0
        # Their numbers. Read at every step, for which a WeakSet is slow
        self._optimizers: dict[weakref.ref[Optimizer], int] = {}
        self.on_made: list[Callable[[Optimizer], None]] = []
        self.on_zero_grad: list[Callable[[], None]] = []
        self._modules: weakref.WeakSet[Module] = weakref.WeakSet()

    def install(self, undo: ExitStack) -> None:
        """Watch the making of optimizers, ``train()`` and ``eval()``, and the roots."""
        patching.wrap(Optimizer, "__init__", then(self._add_optimizer), undo, Training.RANKS)
        patching.wrap(Module, "train", then(self._modules.add), undo)
        for owner in (Optimizer, Module):
            patching.wrap(owner, "zero_grad", then(self._zeroed), undo, Training.RANKS)
        self._roots.on_discover.append(self._add_root)
        undo.callback(self._roots.on_discover.remove, self._add_root)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are alive, in the order of their construction."""
        return [optimizer for _, optimizer in self.numbered()]

    def numbered(self) -> list[tuple[int, Optimizer]]:
        """Return the optimizers that are alive, each with how many were made before it."""
        known = list(self._optimizers.items())
        return [(number, o) for ref, number in known if (o := ref()) is not None]

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers[weakref.ref(optimizer, self._optimizers.pop)] = self.made
        self.made += 1
        for listen in self.on_made:
            listen(optimizer)

    def _zeroed(self, _: Any) -> None:
        for listen in self.on_zero_grad:
            listen()

    def _add_root(self, _: Root, module: Module) -> None:
        self._modules.add(module)

    def trained(self) -> set[int]:
        """Return the ids of the parameters of all optimizers."""
        return {id(parameter) for group in self.groups() for parameter in group["params"]}

    def why_not_training(self) -> str:
        """Return why a loader that is started now is not for training; empty if it is."""
        if not torch.is_grad_enabled():
            return NO_GRADIENTS
        trained = self.trained()
        if not trained:
            return NO_OPTIMIZER
        models = [
            module
            for module in self._modules
            if any(id(parameter) in trained for parameter in parameters_of(module))
        ]
        if models and not any(module.training for module in models):
            return IN_EVAL
        return ""
