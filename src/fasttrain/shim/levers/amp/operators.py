"""Operators that run in fp32 inside a root in low precision.

Some fail under autocast in backward: autocast has no rule for them, and their forward takes
low-precision or mixed tensors, for which their backward has no kernel. A call that failed in its
backward pass can't be repeated in fp32. The others have rules in torch that spoil a training.

Source: every differentiable operator of torch 2.13's own list of samples (``op_db``) was run on a
CPU under autocast and differentiated, with its first input, the others and all of them in low
precision; those for sparse matrices, which the list lacks, by hand.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.amp import autocast
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import to_float32
from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.gradients import lift
from fasttrain.shim.hooks.scripted import replace_builtin
from fasttrain.shim.levers.amp.script_hooks import Region

# Each asks for ``__torch_function__`` first, so that handlers get the function that scripts know by
# its public name, and not the one beneath.
#
# Module, name, and the name that torch.jit.script has for the operator.
OPERATORS: tuple[tuple[Any, str, str], ...] = (
    (torch.sparse, "mm", "_sparse_mm"),
    (torch.sparse, "addmm", "_sparse_addmm"),
    (torch, "pdist", "pdist"),
    (functional, "pdist", "pdist"),
    (torch, "addr", "addr"),
    (torch.special, "i1", "special_i1"),
    (torch.special, "i1e", "special_i1e"),
)


def run_in_float32(dtype: torch.dtype, region: Region, undo: ExitStack) -> None:
    """Replace the operators for calls inside a root that runs in ``dtype``."""
    for owner, name, aten in OPERATORS:
        original = getattr(owner, name, None)  # some torch versions lack some of them
        if original is not None:
            replacement = _in_float32(original, dtype, region)
            # A script may pickle it, as a part that its model was built with.
            replacement.__module__, replacement.__qualname__ = owner.__name__, name
            replace_builtin(owner, replacement, name, undo, aten)


def _in_float32(original: Any, dtype: torch.dtype, region: Region) -> Any:
    @functools.wraps(original)
    def operator(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function(given := (*args, *kwargs.values())):
            return handle_torch_function(operator, given, *args, **kwargs)
        device = region.where()
        if not device:
            return original(*args, **kwargs)
        with autocast(device, enabled=False):
            return original(*to_float32(args, dtype), **to_float32(kwargs, dtype))

    pass_over(operator, all_it_calls=True)
    return operator


# Recurrent layers of a GPU.
#
# torch's autocast runs them in fp16, whatever the precision that it was entered with. Nothing would
# scale their gradients, of which a part is below what fp16 can hold, and the root would return
# their states in fp16. In fp32 they take the module's own flat weights, without a copy, and
# TF32 as far as the script has it.
#
# Source: ``aten/src/ATen/cudnn/AutocastRNN.cpp``, ``_cudnn_rnn_cast_reflatten``, which names kHalf.
# Should a torch take the precision of autocast there, fp32 is right as well, and slower.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
RECURRENT_IN_FP32 = (
    "recurrent layers ran in fp32: torch's autocast would run them in fp16 on a GPU, whose loss"
    " nothing scales"
)


def run_recurrent_in_float32(
    dtype: torch.dtype, region: Region, note: Callable[[str], None], undo: ExitStack
) -> None:
    """Replace what modules call for recurrent layers, for calls inside a root on a GPU.

    Args:
        dtype: The low precision of roots.
        region: What runs in it.
        note: Adds one detail to the receipt.
        undo: Takes the inverse.
    """
    if dtype is torch.float16:
        return

    def in_float32(original: Any) -> Any:
        @functools.wraps(original)
        def layer(*args: Any, **kwargs: Any) -> Any:
            if region.where() != "cuda":  # ROCm's is called so, too
                return original(*args, **kwargs)
            note(RECURRENT_IN_FP32)
            with autocast("cuda", enabled=False):
                return original(*to_float32(args, dtype), **to_float32(kwargs, dtype))

        pass_over(layer, all_it_calls=True)
        return layer

    functions: Any = torch._VF  # where the modules look them up at each call
    for name in RECURRENT:
        replace_builtin(functions, in_float32(getattr(functions, name)), name, undo)


def lifted(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of low precision in fp32, and anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype is dtype else value


# Lets binary_cross_entropy run on the output of a root in low precision.
#
# It is the one operator that raises under autocast; here it runs in fp32 instead. It also takes
# the logarithm of p and of 1 - p, and bf16 has no number between 0.996 and 1. A wrong prediction
# with high confidence would have the probability 1, a loss of 100 and no gradient. Only such
# probabilities are computed again, in fp32 from their logits; all others are the same as with
# autocast by hand.
#
# Source: ``torch/csrc/autocast_mode.h`` of torch 2.13: "banned" is binary_cross_entropy alone.


class _Newest(threading.local):
    """The last low-precision sigmoid of the root call that a thread is in."""

    output: Tensor | None = None
    logits: Tensor | None = None


class BinaryCrossEntropy:
    """Follows sigmoids from their logits out of the root and into the loss.

    Args:
        dtype: The low precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._newest = _Newest()
        self._logits: Any = WeakTensorKeyDictionary()  # by the root's output in fp32

    def install(self, undo: ExitStack) -> None:
        """Watch sigmoid as function and method, and replace the operator."""
        sigmoid = self._watched(torch.sigmoid)
        # A script may pickle it, as the activation that its model was built with.
        sigmoid.__module__, sigmoid.__qualname__ = "torch", "sigmoid"
        replace_builtin(torch, sigmoid, "sigmoid", undo)
        patching.wrap(Tensor, "sigmoid", self._watched, undo)
        # The innermost name, not torch.nn.functional's: that one is a Python function, which
        # scripts pass around and torch.jit.script reads the source of.
        loss = self._loss(torch._C._nn.binary_cross_entropy)
        replace_builtin(torch._C._nn, loss, "binary_cross_entropy", undo)

    def to_float32(self, output: Tensor) -> Tensor:
        """Return an output of a root in fp32, and remember its logits."""
        result = lift(output)
        logits = self._logits_inside(output)
        if logits is not None:
            self._logits[result] = logits
        return result

    def forget(self) -> None:
        """Drop the last sigmoid at the end of the root's call."""
        self._newest.output = self._newest.logits = None

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def sigmoid(input: Any, *args: Any, **kwargs: Any) -> Any:
            if has_torch_function((input,)):
                return handle_torch_function(sigmoid, (input,), input, *args, **kwargs)
            output = original(input, *args, **kwargs)
            # Compiled code does not round what leaves the root: see `RootCalls.finish`.
            if (
                not torch.compiler.is_compiling()
                and output.dtype is self._dtype
                and torch.is_autocast_enabled(output.device.type)
            ):
                self._newest.output, self._newest.logits = output, input
            return output

        return sigmoid

    def _loss(self, original: Any) -> Any:
        def binary_cross_entropy(
            input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
        ) -> Any:
            precise = self._precise(input, target)
            device = input.device.type
            if not torch.is_autocast_enabled(device):
                return original(precise, target, weight, reduction)
            tensors = to_float32((precise, target, weight), torch.get_autocast_dtype(device))
            with autocast(device, enabled=False):
                return original(*tensors, reduction)

        return binary_cross_entropy

    def _precise(self, probabilities: Tensor, target: Tensor) -> Tensor:
        """Return probabilities; those of infinite loss are computed from their logits in fp32."""
        if torch.compiler.is_compiling() or target.shape != probabilities.shape:
            return probabilities
        logits = self._logits_inside(probabilities)
        if logits is None:
            logits = self._logits_outside(probabilities)
        if logits is None:
            return probabilities
        wrongly_0 = (probabilities == 0) & (target > 0)
        wrongly_1 = (probabilities == 1) & (target < 1)
        return torch.where(wrongly_0 | wrongly_1, logits.float().sigmoid(), probabilities.float())

    def _logits_inside(self, probabilities: Tensor) -> Tensor | None:
        output, logits = self._newest.output, self._newest.logits
        if output is None or logits is None:
            return None
        return _like(probabilities, output, logits)

    def _logits_outside(self, probabilities: Tensor) -> Tensor | None:
        for base in (probabilities, probabilities._base):
            if base is not None and base in self._logits:
                return _like(probabilities, base, self._logits[base])
        return None


def _like(view: Tensor, base: Tensor, numbers: Tensor) -> Tensor | None:
    """Return the numbers of ``base`` in the shape of ``view``; None if that isn't a view of all."""
    if view is base:
        return numbers
    same = view._base is base and view.numel() == base.numel()
    in_order = view.is_contiguous() and base.is_contiguous()
    return numbers.reshape(view.shape) if same and in_order else None


# Lets probabilities that a root returns sum to 1.
#
# Autocast runs softmax in fp32 on a GPU, and in low precision on a CPU. There, each probability is
# off by up to 2^-9, and so is their sum, for which torch.distributions and NumPy refuse them. What
# leaves the root is divided by its sum. The GPU's rule would do more, but made the steps of a
# model with attention written by hand take 1.06 times as long at 128 tokens and 1.5 times at 512
# and 1024 (one core of a Xeon with AMX, torch 2.13).
#
# Softmax is seen by a rule under the autocast of a CPU, registered as torch registers its own: so
# in all ways that a script may call it.


SOFTMAX = ("softmax", "log_softmax")
CPU_RULES = "AutocastCPU"  # a dispatch key


class _Softmaxes(threading.local):
    """By result, the dimensions and kinds of the softmaxes of the root call that a thread is in."""

    def __init__(self) -> None:
        self.made: Any = WeakTensorKeyDictionary()


class Probabilities:
    """Follows softmaxes in low precision out of a root on a CPU.

    Args:
        dtype: The low precision.
        region: What runs in it.
    """

    def __init__(self, dtype: torch.dtype, region: Region) -> None:
        self._dtype = dtype
        self._region = region
        self._here = _Softmaxes()

    def install(self, undo: ExitStack) -> None:
        """Register rules, as far as torch has none."""
        torchs: Any = torch.library  # without annotations
        rules = torchs.Library("aten", "IMPL", CPU_RULES)
        undo.callback(rules._destroy)
        for name in SOFTMAX:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}.int", CPU_RULES):
                rules.impl(f"{name}.int", self._rule(getattr(torch.ops.aten, name).int, name))

    def forget(self) -> None:
        """Drop the softmaxes at the end of the root's call."""
        self._here.made.clear()

    def _rule(self, operator: Any, name: str) -> Any:
        def rule(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
            with autocast("cpu", enabled=False):
                output = operator(input, dim, dtype)
            if output.dtype is self._dtype and self._region.device == "cpu":
                self._here.made[output] = dim, name
            return output

        return rule

    @torch.no_grad()
    def correct(self, output: Tensor, lifted: Tensor) -> None:
        """Have the probabilities sum to 1 in an output of a root, whose gradient stays.

        Args:
            output: In low precision.
            lifted: The same in fp32.
        """
        made = self._here.made
        base = output if output in made else output._base
        if base is None or base not in made:
            return
        dim, name = made[base]
        whole = base.detach().float()
        if name == "softmax":
            whole = whole / whole.sum(dim, keepdim=True)
        else:
            whole = whole - whole.logsumexp(dim, keepdim=True)
        numbers = _like(output, base, whole)
        if numbers is not None:
            lifted.detach().copy_(numbers)
