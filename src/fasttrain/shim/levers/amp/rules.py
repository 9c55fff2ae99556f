"""Which roots bf16 is left out of where nobody asked for it by name.

The rules look at the shapes of matrix products and at how often a root is called per optimizer
step, never at a clock:

- Products with too little arithmetic are slower in bf16, because casts cost more than they save.
- A root that is called often, and ever more often, is inside of an adaptive solver or a line
  search, whose error control mistakes rounding for error.

On a CPU a root's first step runs in fp32, so that a small script computes what it does alone. On
other devices it runs in low precision, because fp32 may not fit into their memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.shim.hooks.roots import Call, Root

LEAST_FLOPS = {"cpu": 1 << 22}  # of a product, on average
# Not measured yet: a kernel on a GPU takes some microseconds, in which fp32 does so much.
LEAST_FLOPS_ELSEWHERE = 1 << 26
MANY_CALLS = 8  # in a step
ALIKE_STEPS = 3  # after which a root that is called often may be lowered


@dataclass(slots=True, eq=False)
class Course:
    """How a root has been called.

    Attributes:
        low: Whether its calls run in low precision.
        calls: Calls with gradients since the last optimizer step.
        most: The most of them in one step so far.
        steps: Steps in which it was called.
        alike: How many of the last ones had no more calls than any before.
        flops: Arithmetic of a product in its first call, on average; None before, and where it
            is not known.
    """

    low: bool
    calls: int = 0
    most: int = 0
    steps: int = 0
    alike: int = 0
    flops: float | None = None


class Rules:
    """Watches calls and optimizer steps.

    Args:
        leave: Leaves a root to the script's own precision, with the reason.
    """

    def __init__(self, leave: Callable[[Root, str], None]) -> None:
        self._leave = leave
        self._called: dict[weakref.ref[Root], str] = {}  # since the last step, with the device

    def course(self, root: Root, device: str) -> Course:
        """Return what is known of a root that was not called before."""
        return Course(low=_is_compiled(root) or not root.trainable or device != "cpu")

    def count(self, root: Root, course: Course, device: str, call: Call) -> Call:
        """Count a call, and return what to call in its place."""
        if not torch.is_grad_enabled() or not root.trainable:
            return call
        course.calls += 1
        self._called[weakref.ref(root)] = device
        if course.steps and course.calls > max(MANY_CALLS, course.most):
            self._leave(
                root,
                f"called {course.calls} times in a step after at most {course.most}, as by an"
                " adaptive solver or a line search, whose error control rounding defeats",
            )
        first = course.steps == 0 and course.calls == 1
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if not first or transformed or _is_compiled(root):
            return call

        def counted(*args: Any, **kwargs: Any) -> Any:
            with Products() as products:
                output = call(*args, **kwargs)
            course.flops = products.mean()
            return output

        return counted

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Judge the roots that were called in a step."""
        if torch.compiler.is_compiling():
            return
        called, self._called = self._called, {}
        for ref, device in called.items():
            root = ref()
            if root is not None and root.precision is not None:
                self._judge(root, root.precision.course, device, isinstance(optimizer, LBFGS))

    def _judge(self, root: Root, course: Course, device: str, line_search: bool) -> None:
        least = LEAST_FLOPS.get(device, LEAST_FLOPS_ELSEWHERE)
        if line_search and course.calls > 1:
            self._leave(
                root,
                f"LBFGS calls it {course.calls} times in a step, and takes differences of"
                " gradients, which rounding defeats",
            )
        elif course.flops is not None and course.flops < least:
            self._leave(
                root,
                f"its matrix products have {course.flops:,.0f} operations on average: below"
                f" {least:,} casts cost more than bf16 saves",
            )
        course.alike = course.alike + 1 if course.calls <= course.most else 1
        course.most = max(course.most, course.calls)
        course.low = course.low or course.most <= MANY_CALLS or course.alike >= ALIKE_STEPS
        course.steps += 1
        course.calls, course.flops = 0, None


def _is_compiled(root: Root) -> bool:
    """Return whether fp32 would be compiled for a first step alone."""
    module: Any = root.ref()
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the arithmetic of matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops: list[int] = []
        self._known = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and count it."""
        from torch.utils.flop_counter import flop_registry

        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        packet = func._overloadpacket
        count: Any = flop_registry.get(packet)
        if count is not None:
            self._flops.append(count(*args, **kwargs, out_val=output))
        elif packet is getattr(torch.ops.aten, "mkldnn_rnn_layer", None):  # an LSTM on a CPU
            self._flops.append(_flops_of_layer(*args[:3]))
        elif "rnn" in str(packet):  # a whole recurrent layer of a GPU's
            self._known = False
        return output

    def mean(self) -> float | None:
        """Return the operations of a product on average; None where there are none, or unknown."""
        return sum(self._flops) / len(self._flops) if self._flops and self._known else None


def _flops_of_layer(inputs: Tensor, of_input: Tensor, of_state: Tensor) -> int:
    """Return the operations of a recurrent layer's products, which one operator makes.

    Args:
        inputs: Of shape ``(steps, batch, features)``.
        of_input: Weights that multiply the inputs, of shape ``(gates, features)``.
        of_state: Weights that multiply the state, of shape ``(gates, hidden)``.
    """
    steps, batch = inputs.shape[:2]
    return 2 * steps * batch * (of_input.numel() + of_state.numel())
