"""Gathers sharded parameters in the precision to which autocast rounds them.

FSDP gathers the parameters of a block before its forward and its backward pass. Under autocast a
linear layer rounds its weight to bf16, so that gathering bf16 gives the same results with half of
the bytes. It takes less memory, too: what the layer keeps for the backward pass is then the
gathered weight, which FSDP frees after the forward pass, and not a rounded copy, of which there
would be one for every weight of the model. Shards stay fp32, and gradients are summed over the
ranks in fp32, as without it.

That holds for parameters that are only used where autocast rounds them. Two training calls are
watched before, and calls 8, 16, 32, ... after: a parameter that is used otherwise, such as that of
a norm, is gathered in its own type. So are all in calls that don't train, and in compiled models,
into whose graphs nobody sees.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.containers import map_tensors, tensors_in

WATCHED = 2  # calls, before parameters are gathered in low precision
# Functions that autocast gives all of their tensors in low precision.
_ROUNDED: frozenset[Any] = frozenset({
    functional.linear,
    torch.conv1d, torch.conv2d, torch.conv3d,
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
    torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__,
})  # fmt: skip
# The same of those that torch's attention hands to `linear`.
_ATTENTION = functional.multi_head_attention_forward
_OF_ATTENTION = (
    "in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias",
    "q_proj_weight", "k_proj_weight", "v_proj_weight",
)  # fmt: skip
# What says nothing of a parameter's numbers or type.
_UNREAD: frozenset[Any] = frozenset({
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride,
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda",
    )),
})  # fmt: skip
_TORCH = str(torch.__path__[0])
# What FSDP has of a parameter for each precision in which it gathers it.
_OF_PRECISION = ("param_dtype", "all_gather_outputs", "_unsharded_param")
_NEEDED = (*_OF_PRECISION[:2], "unsharded_accumulated_grad", "accumulate_unsharded_grad_if_needed")
_LOWERED: weakref.WeakSet[Any] = weakref.WeakSet()  # FSDP's parameters, of all roots


class LowGathers:
    """Which parameters of one root are gathered in low precision.

    Args:
        module: The root, sharded.
        state: FSDP's state of it.
        parameters: FSDP's parameters of it and of its blocks.
        ranks: All ranks.
        tell: Called with sentences for the receipt.
    """

    def __init__(
        self,
        module: nn.Module,
        state: Any,
        parameters: list[Any],
        ranks: Ranks,
        tell: Callable[[str], None],
    ) -> None:
        self._ref = weakref.ref(module)
        self._state = state
        self._ranks = ranks
        self._tell = tell
        able = all(hasattr(one, name) for one in parameters for name in _NEEDED)
        fp32 = [one for one in parameters if able and one.orig_dtype is torch.float32]
        self._candidates: list[Any] = fp32
        self._device = next((one.device.type for one in parameters), "cpu")
        self._dtype: torch.dtype | None = None
        self._calls = self._watched = 0  # under autocast
        self._found = ""  # why parameters aren't to be lowered any more
        # Between a forward pass and its backward pass, whose graph has gathered tensors.
        self._between = False
        # What FSDP has of each lowered parameter for the precision that isn't in use.
        self._other: dict[Any, dict[str, Any]] = {}
        self._refused: set[int] = set()  # places among the candidates

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a training call of the root."""
        dtype = None
        if torch.is_autocast_enabled(self._device):
            dtype = torch.get_autocast_dtype(self._device)
        if self._other and dtype is not self._dtype:
            self._raise("it isn't called under autocast any more")
        if dtype is None or not self._candidates:
            return run(*args, **kwargs)
        self._calls += 1
        self.after_backward()
        if self._found and not self._between:
            self._raise(self._found)
        elif self._watched >= WATCHED and not self._other and not self._between:
            self._lower(dtype)
        self._between = True
        # FSDP makes the whole parameters in the first call.
        due = self._calls > 1 and not self._calls & (self._calls - 1)
        if not due or self._is_compiled():
            return run(*args, **kwargs)
        with _Uses(self._candidates) as uses:
            output = run(*args, **kwargs)
        self._watched += 1
        self._judge(uses)
        return output

    def after_backward(self) -> None:
        """Note whether a backward pass has used up what the calls before it have gathered."""
        self._between = self._between and bool(self._state._comm_ctx.post_forward_order)

    @contextmanager
    def in_their_type(self) -> Iterator[None]:
        """Gather all parameters in their own type, in a call that doesn't train."""
        if not self._other:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _judge(self, uses: _Uses) -> None:
        """Note which parameters aren't to be gathered in low precision, the same on all ranks."""
        own = [str(at) for at in range(len(self._candidates)) if not uses.only_rounded(at)]
        for text in self._ranks.gather(" ".join(own)):
            self._refused.update(map(int, text.split()))
        refused = [self._candidates[at] for at in sorted(self._refused)]
        if wrong := [one for one in refused if one in self._other]:
            name = self._name(wrong[0].sharded_param)
            self._found = f"{name} is used otherwise than in a product of matrices"

    def _name(self, parameter: Tensor) -> str:
        module: Any = self._ref()
        names: Any = ((name, p) for name, p in module.named_parameters() if p is parameter)
        return str(next(names)[0])

    def _is_compiled(self) -> bool:
        module: Any = self._ref()
        return any(part._compiled_call_impl is not None for part in nn.Module.modules(module))

    def _lower(self, dtype: torch.dtype) -> None:
        chosen = [one for at, one in enumerate(self._candidates) if at not in self._refused]
        if not chosen:
            self._candidates = []
            return
        self._dtype = dtype
        for one in chosen:
            _LOWERED.add(one)
            one.accumulate_unsharded_grad_if_needed = functools.partial(_accumulate, one)
            self._other[one] = {"param_dtype": dtype, "all_gather_outputs": []}
        self._exchange()
        name = str(dtype).removeprefix("torch.")
        self._tell(
            f"{len(chosen)} of {len(self._candidates)} parameters are gathered in {name}, to which"
            " autocast rounds them anyway; their gradients are summed in fp32"
        )

    def _raise(self, why: str) -> None:
        """Gather all parameters in their own type from now on."""
        self._exchange()
        for one in self._other:
            _LOWERED.discard(one)
            del one.accumulate_unsharded_grad_if_needed
        self._other, self._candidates = {}, []
        self._tell(f"parameters are gathered in fp32 again: {why}")

    def _exchange(self) -> None:
        """Exchange what FSDP has of the lowered parameters for the other precision."""
        for one, other in self._other.items():
            has = vars(one)
            self._other[one] = {name: has.pop(name) for name in _OF_PRECISION if name in has}
            has.update(other)


def _accumulate(one: Any) -> None:
    """Keep a low-precision gradient of a gathered parameter in fp32, for FSDP to reduce.

    FSDP does so itself where it is told to have everything of a block in low precision.
    """
    parameter = getattr(one, "_unsharded_param", None)
    if parameter is None or parameter.grad is None:
        return
    gradient, parameter.grad = parameter.grad.float(), None
    before = one.unsharded_accumulated_grad
    one.unsharded_accumulated_grad = gradient if before is None else before + gradient


class _Uses(TorchFunctionMode):
    """Notes how gathered parameters are used.

    Args:
        parameters: FSDP's parameters.
    """

    paused = False

    def __init__(self, parameters: list[Any]) -> None:
        super().__init__()
        self._places = {
            id(one._unsharded_param): at
            for at, one in enumerate(parameters)
            if hasattr(one, "_unsharded_param")
        }
        self._rounded: set[int] = set()
        self._otherwise: set[int] = set()

    def only_rounded(self, at: int) -> bool:
        """True if a parameter was used, and everywhere so that autocast rounds it."""
        return at in self._rounded and at not in self._otherwise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _UNREAD and not _Uses.paused:
            found = self._found((args, kwargs))
            if found and not _asked_by_torch(func):
                rounded = self._rounded_by(func, args, kwargs) & found
                self._rounded |= rounded
                self._otherwise |= found - rounded
        return func(*args, **kwargs)

    def _found(self, value: Any) -> set[int]:
        return {self._places[id(t)] for t in tensors_in(value) if id(t) in self._places}

    def _rounded_by(self, func: Any, args: Any, kwargs: Any) -> set[int]:
        """Return the parameters that a function uses rounded."""
        if func is _ATTENTION:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            handed: Any = [given.get(name) for name in _OF_ATTENTION]
        elif func in _ROUNDED:
            handed = args, kwargs
        else:
            return set()
        tensors = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
        rounds = all(torch.is_autocast_enabled(t.device.type) for t in tensors)
        return self._found(handed) if rounds else set()


def _asked_by_torch(func: Any) -> bool:
    """True if torch's own code asks for a type, such as to choose a kernel for inference."""
    if func != Tensor.dtype.__get__:  # type: ignore[attr-defined]
        return False
    return sys._getframe(2).f_code.co_filename.startswith(_TORCH)


class _Widened(TorchFunctionMode):
    """Hands lowered parameters to functions in fp32, where a trial runs without autocast."""

    def __init__(self) -> None:
        super().__init__()
        lowered = [one for one in _LOWERED if hasattr(one, "_unsharded_param")]
        self._ids = {id(one._unsharded_param) for one in lowered}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        if func not in _UNREAD and any(id(t) in self._ids for t in tensors_in(given)):
            given = map_tensors(given, self._widen)
        return func(*given[0], **given[1])

    def _widen(self, tensor: Tensor) -> Tensor:
        return tensor.float() if id(tensor) in self._ids else tensor


@contextmanager
def unwatched() -> Iterator[None]:
    """Don't take what the block does with parameters for the script's use of them."""
    before, _Uses.paused = _Uses.paused, True
    try:
        yield
    finally:
        _Uses.paused = before


@contextmanager
def widened() -> Iterator[None]:
    """Run the block, a trial, with fp32 copies of lowered parameters."""
    with unwatched(), _Widened() if _LOWERED else nullcontext():
        yield
