"""Decides which roots stay in fp32 when the user didn't ask for bf16 by name.

The rules look at the shapes of matrix products and at the number of calls per optimizer step, never
at a clock, so that a repeated run decides alike:

- Small products are slower in bf16, because casts cost more than they save.
- A root that is called often, and more and more often, is inside an adaptive solver or a line
  search, whose error control takes bf16's rounding for its own error.
- An NVIDIA GPU without native bf16 emulates it. The plan has looked at the GPU that a process sees
  first, and the script may use another one.

On a CPU a root's first step runs in fp32, so that a small script computes what it does alone. On
other devices it runs in low precision, because fp32 may not fit into their memory, but for calls
after the eighth. Until the first step products are counted, by which a root is judged then. The
first call of a root that is called without gradients runs in fp32 on all, and on a CPU all of them
up to the next step.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.shim.hooks.roots import Call, Root
from fasttrain.shim.process.callsite import call_site

LEAST_FLOPS = {"cpu": 1 << 22}  # mean operations of a product
# To queue a product and its casts takes the host as long as a fast GPU to compute a large one.
# Measured on an H200, of 16,896 lanes: bf16 is slower with up to 2^31 operations, faster from 2^33
# on. For other NVIDIA GPUs it is in proportion. What measures these: benchmarks/small_products.py
LEAST_FLOPS_PER_LANE = 1 << 18
LEAST_FLOPS_ELSEWHERE = 1 << 26  # estimated
# fp32 lanes of a multiprocessor, by compute capability; 128 from 8.6 on. Source: CUDA C++
# Programming Guide 12.8, "Arithmetic Instructions".
FEWER_LANES = {(8, 0): 64}
NARROW = 4  # columns: of coordinates in space, homogeneous ones included
MANY_CALLS = 8  # in a step
ALIKE_STEPS = 3  # after which a root that is called often may be lowered
JUDGING = (
    "it runs in fp32 until an optimizer step, or without gradients its first call, has shown how it"
    " is called"
)
LINE_SEARCH = "LBFGS calls it, and takes differences of gradients, in which rounding dominates"


@dataclass(slots=True, eq=False)
class CallHistory:
    """How a root was called so far.

    Attributes:
        low: Whether its calls run in low precision.
        frozen: Whether nothing of it has been trained yet: it couldn't be.
        calls: Calls with gradients since the last optimizer step.
        most: The largest number of calls in one step.
        steps: Steps in which it was called.
        alike: How many steps in a row had no more calls than earlier ones.
        looked: Whether its products were looked through in low precision.
        trained: Whether it was called in training mode.
        small: Why bf16 doesn't pay by the products of its calls before the first step; empty if it
            does by those of one of them, None before the first one.
        idle: Why calls without gradients run in fp32 while there were none with gradients; empty
            if they don't, None before the first one.
        without: Calls without gradients since the last optimizer step, while there were none with.
        stepped: Whether a step of any optimizer came after some of these.
    """

    low: bool
    frozen: bool = False
    calls: int = 0
    most: int = 0
    steps: int = 0
    alike: int = 0
    looked: bool = False
    trained: bool = False
    small: str | None = None
    idle: str | None = None
    without: int = 0
    stepped: bool = False


class Rules:
    """Counts calls of roots per optimizer step, and judges the roots after it.

    Args:
        leave: Leaves a root in the script's own precision, with the reason.
        note: Adds one detail to the receipt.
    """

    def __init__(self, leave: Callable[[Root, str], None], note: Callable[[str], None]) -> None:
        self._leave, self._note = leave, note
        self._called: set[weakref.ref[Root]] = set()  # since the last step
        self._emulates: dict[torch.device, bool] = {}
        self._searches = False  # whether the last step that began is one of a line search

    def history(self, root: Root, device: str) -> CallHistory:
        """Return the history of a root that was not called before."""
        low = not root.trainable or _begins_low(root, device)
        return CallHistory(low=low, frozen=not root.trainable)

    def emulates(self, device: torch.device) -> bool:
        """True if a device computes bf16 with other arithmetic, which is slower than fp32.

        Source: CUDA C++ Programming Guide 12.8, "Arithmetic Instructions": bf16 from 8.0.
        """
        if device.type != "cuda" or torch.version.hip:
            return False
        if device not in self._emulates:
            self._emulates[device] = torch.cuda.get_device_capability(device) < (8, 0)
        return self._emulates[device]

    def count(self, root: Root, history: CallHistory, device: str, call: Call) -> tuple[str, Call]:
        """Count a call.

        Returns:
            Why it runs in fp32, empty if it doesn't, and the function to call in its place.
        """
        if not torch.is_grad_enabled() or not root.trainable:
            return self._without_gradients(root, history, device, call)
        if history.frozen:
            history.frozen, history.low = False, _begins_low(root, device)
        if self._searches:
            self._leave(root, LINE_SEARCH)
            return LINE_SEARCH, call
        if _evaluates(root, history):
            return "" if history.low else JUDGING, call
        history.calls += 1
        self._called.add(weakref.ref(root))
        if history.steps and history.calls > max(MANY_CALLS, history.most):
            self._leave(
                root,
                f"called {history.calls} times in a step after at most {history.most}, as by an"
                " adaptive solver or a line search, whose error control fails on rounding; if that"
                " is an evaluation, put torch.no_grad() around it",
            )
        elif not history.steps and history.calls > MANY_CALLS and not _is_compiled(root):
            history.low = False  # the next steps show whether it is called as often again
        elif not history.steps and history.small != "" and _can_count(root):
            if history.small is None:
                self._called.discard(weakref.ref(root))  # until the call has ended
            call = _counted(call, functools.partial(self._judge_size, root, history, device))
        elif history.steps and history.low and not history.looked and _can_count(root):
            history.looked = True
            call = _counted(call, functools.partial(self._look, root, device))
        return "" if history.low else JUDGING, call

    def _judge_size(
        self, root: Root, history: CallHistory, device: str, products: Products
    ) -> None:
        """Note whether the products of a call are worth bf16.

        One call doesn't say: it may be a trial with a single row. By the first step a root has had
        one that trains it, and is as large as its largest call. A step while the call goes on,
        in another thread or in the call itself, doesn't judge the root: nothing is known yet.
        """
        why = _small(products.mean(), _least_flops(root, device))
        history.small = why if history.small is None else history.small and why
        self._called.add(weakref.ref(root))

    def _look(self, root: Root, device: str, products: Products) -> None:
        """Report what may be coordinates, which bf16 rounds to 8 bits."""
        if products.narrow:
            self._note(
                f"{root.name} multiplies by a matrix of at most {NARROW} columns in bfloat16"
                f" ({products.narrow}): if these are coordinates that have to be exact, put"
                f" torch.autocast({device!r}, enabled=False) around that line"
            )

    def _without_gradients(
        self, root: Root, history: CallHistory, device: str, call: Call
    ) -> tuple[str, Call]:
        """Judge a call without gradients, as those of a target network, by the size of the first.

        Calls with gradients count more: a first one without may be a trial with a single row.
        """
        if history.steps or history.calls:
            return "" if history.low else JUDGING, call
        if not history.low:
            self._called.add(weakref.ref(root))
            history.without += 1
            if history.stepped and history.without > MANY_CALLS:
                history.idle = _many_without(history.without)
        if history.idle is None and not _can_count(root):
            history.idle = ""
        if history.idle is not None:
            waits = not (history.low or history.stepped)
            return history.idle or (JUDGING if waits else ""), call

        least = _least_flops(root, device)

        def judge(products: Products) -> None:
            history.idle = _small(products.mean(), least)

        return JUDGING, _counted(call, judge)

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Note whether the closure of a step is called by a line search."""
        self._searches = isinstance(optimizer, LBFGS)

    def after_step(self, *_: Any) -> None:
        """Judge the roots that were called in a step."""
        self._searches = False
        if torch.compiler.is_compiling():
            return
        called, self._called = self._called, set()
        for ref in called:
            root = ref()
            if root is not None and root.precision is not None and not root.precision.left:
                history = root.precision.history
                if history.calls:
                    self._judge_calls(root, history)
                else:
                    _judge_without(history)

    def _judge_calls(self, root: Root, history: CallHistory) -> None:
        if not history.steps and history.small:
            self._leave(root, history.small)
        history.alike = history.alike + 1 if history.calls <= history.most else 1
        history.most = max(history.most, history.calls)
        history.low = history.low or history.most <= MANY_CALLS or history.alike >= ALIKE_STEPS
        history.steps += 1
        history.calls = 0


def _judge_without(history: CallHistory) -> None:
    """Judge a root that was called without gradients alone, such as a teacher or an average.

    An adaptive solver may call one so, and with gradients in backward passes only.
    """
    if history.without > MANY_CALLS:
        history.idle = _many_without(history.without)
    history.without, history.stepped = 0, True


def _many_without(calls: int) -> str:
    return (
        f"called {calls} times without gradients between two steps, as by an adaptive solver, whose"
        " error control fails on rounding"
    )


def _evaluates(root: Root, history: CallHistory) -> bool:
    """True for a call in evaluation mode of a root that has been in training mode, which is noted.

    Beginners, and passes over the training set for its accuracy, leave out ``no_grad``.
    """
    module: Any = root.ref()
    history.trained = history.trained or module.training
    return history.trained and not module.training


def _counted(call: Call, judge: Callable[[Products], object]) -> Call:
    """Return a function that calls another one, and is judged by its products.

    A call that ends by an exception, as where a hook takes features and leaves out the rest, is
    judged as well if it had any.
    """

    def counted(*args: Any, **kwargs: Any) -> Any:
        ended = False
        products = Products()
        try:
            with products:
                output = call(*args, **kwargs)
            ended = True
            return output
        finally:
            if ended or products.mean() is not None:
                judge(products)

    return counted


def _least_flops(root: Root, device: str) -> int:
    """Return the mean operations of a root's products from which on bf16 pays on its device."""
    parameter = root.parameter()
    return least_flops(torch.device(device) if parameter is None else parameter.device)


def least_flops(device: torch.device) -> int:
    """Return the mean operations of products from which on bf16 pays on a device."""
    if device.type != "cuda" or torch.version.hip or "cuda" in LEAST_FLOPS:
        return LEAST_FLOPS.get(device.type, LEAST_FLOPS_ELSEWHERE)
    properties = torch.cuda.get_device_properties(device)
    lanes = FEWER_LANES.get((properties.major, properties.minor), 128)
    return LEAST_FLOPS_PER_LANE * lanes * properties.multi_processor_count


def _small(flops: float | None, least: int) -> str:
    """Return why products of a mean size aren't worth bf16; empty if they are, or aren't known."""
    if flops is None or flops >= least:
        return ""
    return (
        f"its matrix products have {flops:,.0f} operations on average: below {least:,} casts cost"
        " more than bf16 saves"
    )


def _can_count(root: Root) -> bool:
    """True if the products of a root's call can be counted.

    Under torch.func's transforms as well, which call a mode for what they make of an operator: with
    all rows under vmap. That was tried with torch 2.13.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed and not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return False
    return not _is_compiled(root) and _leaves_compiling_alone()


def _begins_low(root: Root, device: str) -> bool:
    """True if a root that is trained runs in low precision before it was judged."""
    return _is_compiled(root) or device != "cpu"


def _is_compiled(root: Root) -> bool:
    """True if a root is compiled: fp32 for the first step would need another compilation."""
    module: Any = root.ref()
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _leaves_compiling_alone() -> bool:
    """True unless dynamo may meet the mode that counts, in a torch where it stops at any.

    It would skip the functions that a root has compiled inside, in all later calls too.
    """
    return (
        hasattr(TorchDispatchMode, "ignore_compile_internals") or "torch._dynamo" not in sys.modules
    )


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of matrix products and convolutions.

    Attributes:
        narrow: Where the script has a product in bf16 that may be one of coordinates; empty if
            there was none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrow = ""
        self._flops: list[int] = []
        self._known = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have dynamo compile without the mode, and run what it has compiled with it."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and count it."""
        from torch.utils.flop_counter import flop_registry

        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        packet = func._overloadpacket
        if not self.narrow and _is_of_coordinates(packet, args):
            self.narrow = call_site()
        count: Any = flop_registry.get(packet)
        if count is not None:
            self._count(count, args, kwargs, output)
        elif packet is getattr(torch.ops.aten, "mkldnn_rnn_layer", None):  # an LSTM on a CPU
            self._flops.append(_flops_of_layer(*args[:3]))
        elif "rnn" in str(packet):  # a recurrent layer on a GPU, which is one operator
            self._known = False
        return output

    def _count(self, count: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Add an operator's operations by a formula of torch's, or of whoever has registered it.

        A formula refuses shapes that it doesn't expect, as torch's does up to 2.11 for attention
        whose keys have fewer heads. The script's call has gone well, and must not fail by that.

        Source: https://github.com/pytorch/pytorch/pull/177188
        """
        try:
            self._flops.append(count(*args, **kwargs, out_val=output))
        except Exception:  # noqa: BLE001 - asserts of torch's, and code of any package
            self._known = False

    def mean(self) -> float | None:
        """Return the mean operations of a product; None if there are none, or unknown ones."""
        return sum(self._flops) / len(self._flops) if self._flops and self._known else None


def _is_of_coordinates(packet: Any, args: tuple[Any, ...]) -> bool:
    """True for a product in bf16 of a few columns, by which nothing is trained.

    Such are transforms of points by matrices that come with the data; a layer's weight requires a
    gradient, and so do the queries and keys of attention.
    """
    aten = torch.ops.aten
    if packet not in (aten.mm, aten.bmm, aten.mv) or args[0].dtype is not torch.bfloat16:
        return False
    columns = args[0].shape[-1]
    return columns <= NARROW and not any(tensor.requires_grad for tensor in args[:2])


def _flops_of_layer(inputs: Tensor, of_input: Tensor, of_state: Tensor) -> int:
    """Return the operations of the products in a recurrent layer, which is one operator.

    Args:
        inputs: Of shape ``(steps, batch, features)``.
        of_input: Weights that multiply the inputs, of shape ``(gates, features)``.
        of_state: Weights that multiply the state, of shape ``(gates, hidden)``.
    """
    steps, batch = inputs.shape[:2]
    return 2 * steps * batch * (of_input.numel() + of_state.numel())
