"""Counts and times training steps, for the events and the receipt."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fasttrain.model.outcome import StepStats
from fasttrain.model.vendors import LIKE_CUDA
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.device_clock import (
    DeviceClock,
    Mark,
    Span,
    is_capturing,
    module_of,
    seconds_between,
)
from fasttrain.shim.hooks.loop import known_epoch, on_backward, on_batch
from fasttrain.shim.hooks.roots import Root, first_parameter
from fasttrain.shim.hooks.seams import then
from fasttrain.shim.process import true_clock

# Measures the throughput of training: samples and tokens per second.
#
# What DataLoaders return is counted. A batch counts once, however often models are called with
# it, as soon as a backward pass or an optimizer step follows it. Batches that are read without
# gradients, or that no backward pass follows, belong to a validation. In a script without a
# DataLoader the inputs of models are counted.
#
# Times are those of the device that trains (`DeviceClock`). A step is counted once the device has
# ended it, so that samples and seconds are of the same steps.


_MOST_PENDING = 10_000  # batches without a backward pass, as in a script that only predicts
_DEEPEST = 3  # levels of containers, down to a batch's first tensor
_MOST_VALUES = 8  # of a container that are looked at for it


@dataclass(slots=True)  # not frozen, which takes a microsecond longer to make
class Amount:
    """The size of one batch; tokens are 0 if unknown."""

    samples: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.samples + other.samples, self.tokens + other.tokens)

    def times(self, factor: float) -> Amount:
        """Return the amount times a factor."""
        return Amount(self.samples * factor, self.tokens * factor)


class _Batch(NamedTuple):  # as cheap as a tuple: one is made with each batch, and each step
    source: weakref.ref[Any]  # the iterator; one that is gone was read to its end
    amount: Amount
    at: Mark


class _Step(NamedTuple):
    """A step that the device may not have ended yet.

    Attributes:
        span: Its beginning, which is the end of the step before it, and its end.
        evaluated: The evaluations in it.
        read: What loaders handed out for it.
        called: What models were called with in it.
    """

    span: Span
    evaluated: tuple[Span, ...]
    read: Amount
    called: Amount


class Throughput:
    """Follows batches, model calls and backward passes between the steps of a `StepMeter`.

    Attributes:
        part: The fraction of a batch that this rank trains on: 1, or less if the ranks split each
            batch, which each of them reads and calls the model with as a whole.
        in_step: Whether an optimizer's step is running. Its closure may make several backward
            passes, all with one batch.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self.part = 1.0
        self.in_step = False
        self._clock = clock
        self._trained: weakref.WeakSet[Root] = weakref.WeakSet()
        self.clear()

    def clear(self) -> None:
        """Forget what was measured, before the first step that counts."""
        self._passed = False
        self._total = self._total_called = Amount()
        self._training_s = 0.0
        self._source: weakref.ref[Any] | None = None  # the iterator of the last batch
        self._begin_step()
        self._begin_segment(Mark(0.0))
        self._pending: deque[_Batch] = deque(maxlen=_MOST_PENDING)

    def count_whole(self) -> None:
        """Count whole batches from now on: no rank shares its own with others."""
        self.part = 1.0

    def _begin_step(self) -> None:
        self._read = Amount()  # from loaders, followed by a backward pass
        self._pass = self._segment = self._called = Amount()  # of model calls
        self._evaluated: tuple[Span, ...] = ()

    def _begin_segment(self, now: Mark) -> None:
        """Begin the segment that ends with the next step of any optimizer."""
        self._segment_from = now
        self._paused: Mark | None = None  # when an evaluation began while a training batch waits
        self._aside = False  # whether there was an evaluation before the next training batch
        self._training_from: Mark | None = None

    def handed_out(self, iterator: Any, data: Any) -> None:
        """Note a batch of a DataLoader."""
        if not torch.is_grad_enabled():
            self._evaluating()
            return
        # Only these may end an evaluation, and an event takes a few microseconds.
        ends = self._aside or self._source is None or self._source() is not iterator
        self._source = weakref.ref(iterator)
        at = self._clock.mark() if ends else _host_mark()
        self._pending.append(_Batch(self._source, _of_loader(iterator, data), at))

    def called(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a model call; the largest one before a backward pass is the batch of that pass."""
        if torch.is_grad_enabled():
            self._trained.add(root)
            if self._training_from is None and not self._pending:
                now = self._clock.mark if self._aside else _host_mark
                self._training_from = now()
            if self._paused is not None:
                self._evaluated += ((self._paused, self._clock.mark()),)
                self._paused = None
            self._pass = max(self._pass, _amount((*args, kwargs), root), key=_samples)
            return
        module = root.ref()
        evaluated = root in self._trained and module is not None and not module.training
        if evaluated:
            self._evaluating()

    def _evaluating(self) -> None:
        """Note an evaluation: between two training batches, or while one waits."""
        if self._pending or self._training_from is not None:
            self._paused = self._paused or self._clock.mark()
        else:
            self._aside = True

    def backward(self) -> None:
        """Count what was read and called up to a backward pass."""
        self._passed = True
        self._take()
        if self.in_step:
            self._segment = max(self._segment, self._pass, key=_samples)
        else:
            self._segment += self._pass
        self._pass = Amount()

    def optimizer_step(self, now: Mark) -> None:
        """Count the batches of one optimizer's step; all optimizers of a step share its batches."""
        if not self._passed:  # gradients came from torch.autograd.grad
            self.backward()
        self._passed = self.in_step = False
        self._called = max(self._called, self._segment, key=_samples)
        self._segment = Amount()
        self._begin_segment(now)

    def step(self, began: Mark, ended: Mark) -> _Step:
        """Return the step that ends, to be counted once the device has ended it, too."""
        step = _Step((began, ended), self._evaluated, self._read, self._called)
        self._begin_step()
        self._begin_segment(ended)
        return step

    def count(self, step: _Step, duration_s: float) -> None:
        """Count a step that the device has ended."""
        self._total += step.read
        self._total_called += step.called
        self._training_s += duration_s
        for span in step.evaluated:
            self._training_s -= seconds_between(span) or 0.0

    def rates(self) -> tuple[float, float]:
        """Return this rank's samples and tokens per second of training; 0 where unknown."""
        if self._training_s <= 0.0:
            return 0.0, 0.0
        # Loaders that were read only before the first step fed none of the timed steps.
        total = self._total if self._total.samples else self._total_called.times(self.part)
        return total.samples / self._training_s, total.tokens / self._training_s

    def _take(self) -> None:
        if not self._pending:
            self._leave_out(self._training_from)
            return
        # An iterator that is gone was read to its end: by an evaluation that keeps gradients on.
        pending = list(self._pending)  # a thread of the script's may read on
        live = [batch for batch in pending if batch.source() is not None] or pending
        if pending[0] is not live[0]:
            self._aside = True
        self._leave_out(live[0].at)
        for batch in live:
            self._read += batch.amount.times(self.part)
        for _ in pending:
            self._pending.popleft()

    def _leave_out(self, until: Mark | None) -> None:
        """Subtract the time of an evaluation that came after a step and ended at ``until``."""
        if self._aside and until is not None:
            self._evaluated += ((self._segment_from, until),)
        self._aside = False
        self._training_from = self._training_from or until


def _host_mark() -> Mark:
    return Mark(true_clock.perf_counter())


_samples = attrgetter("samples")


def _of_loader(iterator: Any, data: Any) -> Amount:
    """Return a batch's size by its sampler if possible: what is collated may have any form."""
    amount, epoch = _amount(data), known_epoch(iterator)
    if epoch is None or not epoch.batch_size:
        return amount  # a sampler's own batch_size may be in tokens, or an upper bound
    left = epoch.samples - (iterator._num_yielded - 1) * epoch.batch_size
    return Amount(float(min(epoch.batch_size, left)) if left > 0 else amount.samples, amount.tokens)


def _amount(data: Any, root: Root | None = None) -> Amount:
    """Return the size of a batch, or of what a root is called with."""
    with torch._C.DisableTorchFunction():  # the script's would see it
        tensor = _first_tensor(data, _DEEPEST)
        if tensor is None:
            return Amount()
        if root is not None and tensor.dim() == 1 and _is_one_sample(root, tensor):
            return Amount(1.0)
        # Integers of shape (batch, sequence) are taken for token ids.
        whole = tensor.dtype in (torch.int64, torch.int32) and tensor.dim() == 2
        # A nested tensor of torch's first kind has a size, but no shape.
        return Amount(float(tensor.size(0)), float(tensor.numel()) if whole else 0.0)


def _is_one_sample(root: Root, vector: Tensor) -> bool:
    """True if a vector fits a root's first weight, as the state by which a policy acts does."""
    if not vector.is_floating_point() or (module := root.ref()) is None:
        return False
    weight = first_parameter(module)
    return weight is not None and weight.dim() == 2 and weight.size(1) == vector.size(0)


def _first_tensor(data: Any, deepest: int) -> Tensor | None:
    """Return the tensor that comes first among a container's first values, if there is one.

    Only what holds its values is looked into: others may read a file for each.
    """
    kind = type(data)
    if issubclass(kind, Tensor):
        return data if data.dim() else None
    if deepest == 0:
        return None
    if issubclass(kind, UserDict):
        data = vars(data).get("data")
        kind = type(data)
    values: Iterator[Any]
    if issubclass(kind, dict):
        values = iter(dict.values(data))
    elif issubclass(kind, list | tuple):
        values = list.__iter__(data) if issubclass(kind, list) else tuple.__iter__(data)
    else:
        return None
    for value in islice(values, _MOST_VALUES):
        if (tensor := _first_tensor(value, deepest - 1)) is not None:
            return tensor
    return None


# Counts and times training steps, for the events and the receipt.


KEPT_INTERVALS = 10_000  # enough for a p95, and bounded however long the run
_MADE = "_patch_step_function"  # called by Optimizer's constructor, from torch 2.0 on


class StepMeter:
    """Counts steps: iterations of the training loop, in which each optimizer steps once.

    The next iteration begins when an optimizer steps for the second time, or when one steps that
    was created during this iteration, such as that of the next cross-validation fold. So the two
    optimizers of a GAN make one step together. If the script has no optimizer, each backward pass
    is a step.

    Attributes:
        steps: Steps so far; never decreases.
        device: Where the first parameter of the first optimizer is, such as ``cuda:0``; without an
            optimizer, where the first loss is. Empty before the first step.
        throughput: Counts samples and tokens; the runtime reports model calls to it.
        on_step: Called after each step with its number.
        before_next: Called before an optimizer begins the next step, with the number of steps.
        on_pass: If each backward pass is a step, called before each one with the number of those
            before it.
    """

    def __init__(self, started_s: float) -> None:
        self._clock = DeviceClock()
        self.throughput = Throughput(self._clock)
        self.on_step: list[Callable[[int], None]] = []
        self.before_next: list[Callable[[int], None]] = []
        self.on_pass: list[Callable[[int], None]] = []
        self._clear(started_s)

    @property
    def capturing(self) -> bool:
        """True in a step that the script captures in a CUDA graph: nothing may wait for it."""
        return bool(self.device) and is_capturing(torch.device(self.device))

    def reset(self) -> None:
        """Count from zero, in a forked child."""
        self._clear(true_clock.perf_counter())

    def _clear(self, started_s: float) -> None:
        self.steps = 0
        self.device = ""
        self._clock.leave()
        self._started_s = started_s
        self._first_step_s = 0.0
        self._last = Mark(0.0)
        self._running: deque[_Step] = deque()  # those that the device hasn't ended
        self._intervals_s: deque[float] = deque(maxlen=KEPT_INTERVALS)
        self._stepped: set[int] = set()  # ids of the optimizers that stepped in this iteration
        # The number of steps when each optimizer was created
        self._made: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._by_passes = True
        self.throughput.clear()

    def reset_times(self) -> None:
        """Forget the times so far; the steps still count."""
        self._running.clear()
        self._intervals_s.clear()
        self._last = self._clock.mark()
        self.throughput.clear()
        self.throughput.step(self._last, self._last)

    def install(self, undo: ExitStack) -> None:
        """Hook the construction and the steps of optimizers, backward passes, and batches."""
        undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        on_backward(self._before_pass, undo)
        on_batch(self.throughput.handed_out, undo)
        if not hasattr(Optimizer, _MADE):
            return  # an optimizer's first step is then in the iteration of another's last one
        # Not around __init__: what raises there would have a frame of ours in its traceback.
        patching.wrap(Optimizer, _MADE, then(self._note_made, even_traced=True), undo)

    def _note_made(self, optimizer: Optimizer) -> None:
        self._by_passes = False
        self._made[optimizer] = self.steps

    @property
    def several(self) -> bool:
        """True if an iteration may have more than one optimizer."""
        return len(self._made) > 1

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.steps and not torch.compiler.is_compiling() and self._begins_step(optimizer):
            for listen in self.before_next:
                listen(self.steps)
        self.throughput.in_step = True

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # dynamo traces a compiled step once; its later runs don't come here
        self._by_passes = False
        if not self.device:
            held = (p for group in optimizer.param_groups for p in group["params"])
            self._follow(next(held, None))
        now = self._clock.mark()
        self.throughput.optimizer_step(now)
        if not self._begins_step(optimizer):
            self._stepped.add(id(optimizer))
            return
        self._stepped = {id(optimizer)}
        self._count(now)
        for listen in self.on_step:
            listen(self.steps)

    def _begins_step(self, optimizer: Optimizer) -> bool:
        # A new optimizer may have the id of one that is gone: it counts by its creation.
        return (
            not self._stepped
            or id(optimizer) in self._stepped
            or self._made.get(optimizer, 0) >= self.steps
        )

    def _follow(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            with torch._C.DisableTorchFunction():  # the script's would see it
                self.device = str(tensor.device)
                self._clock.follow(tensor.device)

    def _before_pass(self, loss: Tensor, *_: Any) -> None:
        if not self._by_passes:
            self.throughput.backward()
            return
        if not self.device:
            self._follow(loss)
        now = self._clock.mark()
        self.throughput.optimizer_step(now)
        if self.steps:
            for listen in self.on_pass:
                listen(self.steps)
        self._count(now)

    def _count(self, now: Mark) -> None:
        step = self.throughput.step(self._last, now)
        if self.steps:
            self._running.append(step)
            self._count_ended()
        else:
            self._first_step_s = now.at_s - self._started_s
        self.steps += 1
        self._last = now

    def _count_ended(self) -> None:
        """Time the steps that the device has ended by now, without waiting for it."""
        while self._running and (taken_s := seconds_between(self._running[0].span)) is not None:
            self._intervals_s.append(taken_s)
            self.throughput.count(self._running.popleft(), taken_s)

    def stats(self, compile_s: float, device: str = "") -> StepStats:
        """Return speed and memory so far; see `StepStats` for units.

        Args:
            compile_s: Time spent compiling.
            device: Whose memory is meant before the first step.
        """
        self._count_ended()
        intervals = sorted(self._intervals_s)
        median_s = statistics.median(intervals) if intervals else 0.0
        samples_per_s, tokens_per_s = self.throughput.rates()
        return StepStats(
            steps=self.steps,
            are_passes=self._by_passes and self.steps > 0,
            median_step_s=median_s,
            p95_step_s=_p95(intervals),
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            first_step_s=self._first_step_s,
            compile_s=compile_s,
            peak_memory_bytes=peak_memory_bytes(self.device or device),
            wall_s=true_clock.perf_counter() - self._started_s,
        )

    def recent_step_s(self) -> float:
        """Return the time of the last step that has ended, in seconds; 0 before the second one."""
        return self._intervals_s[-1] if self._intervals_s else 0.0


def _p95(ascending: Sequence[float]) -> float:
    """Return the 95th percentile (nearest rank), never below the median; 0 without values."""
    return ascending[math.ceil(0.95 * len(ascending)) - 1] if ascending else 0.0


def _in_use(module: Any) -> bool:
    return bool(module.is_initialized() and module.is_available())


def peak_memory_bytes(device: str) -> int:
    """Return the peak of a device's allocator, or of resident memory on a CPU.

    Args:
        device: Such as ``cuda:1``, whichever is the current one; the current one if empty.
    """
    with torch._C.DisableTorchFunction():  # a mode of the script's would see it
        of = torch.device(device) if device else None
    modules: list[Any] = [getattr(torch, name, None) for name in LIKE_CUDA]
    for module in modules if of is None else [module_of(of)]:
        if hasattr(module, "max_memory_allocated") and _in_use(module):
            return int(module.max_memory_allocated(of))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
