"""Gathers sharded parameters in the precision to which autocast rounds them.

FSDP gathers the parameters of a block before its forward and its backward pass. Under autocast a
linear layer rounds its weight to bf16, so that gathering bf16 gives the same results with half of
the bytes. It takes less memory, too: what the layer keeps for the backward pass is then the
gathered weight, which FSDP frees after the forward pass, and not a rounded copy, of which there
would be one for every weight of the model. Shards stay fp32, and gradients are summed over the
ranks in fp32, as without it.

That holds for parameters that are only used where autocast rounds them, and whose gradients come
from one call at a time. The first training calls and their backward passes are watched: a parameter
that is used otherwise, such as that of a norm, is gathered in its own type. So are all in calls
that don't train, and in models of which the script or fasttrain compiles a part, into whose graphs
nobody sees. Parameters in low precision are watched as long as they are gathered so: one that is
used otherwise, is handed on in fp32 in that call, and all are gathered in fp32 from the next on.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.containers import map_tensors, tensors_in
from fasttrain.shim.process.refusal import refuse

WATCHED = 4  # calls, before parameters are gathered in low precision
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
# The nodes that these leave in the autograd graph after a parameter: autocast's casts, and the
# parts that attention cuts its weights into.
_CASTS = ("ToCopyBackward", "SplitBackward", "SplitWithSizesBackward")
# What says nothing of a parameter's numbers.
_DTYPE: Any = Tensor.dtype.__get__  # type: ignore[attr-defined]
_UNREAD: frozenset[Any] = frozenset({
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.requires_grad_,
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "grad",
        "grad_fn",
    )),
    vars(torch._C.TensorBase)["grad"].__set__,
})  # fmt: skip
# What FSDP has of a parameter for each precision in which it gathers it.
_OF_PRECISION = ("param_dtype", "all_gather_outputs", "_unsharded_param")
_NEEDED = (*_OF_PRECISION[:2], "unsharded_accumulated_grad", "init_unsharded_param")

# Where each watched parameter's uses are noted, and its number there; not on the parameter, with
# which it would be copied and pickled.
_NOTED: Any = WeakTensorKeyDictionary()


class LowGathers:
    """Which parameters of one root are gathered in low precision.

    Args:
        module: The root, sharded.
        state: FSDP's state of it.
        parameters: FSDP's parameters of it and of its blocks.
        ranks: All ranks.
        tell: Called with sentences for the receipt.
        compiles: Returns True if the script compiles anything itself.
    """

    def __init__(
        self,
        module: nn.Module,
        state: Any,
        parameters: list[Any],
        ranks: Ranks,
        tell: Callable[[str], None],
        compiles: Callable[[], bool],
    ) -> None:
        self._ref = weakref.ref(module)
        self._state = state
        self._ranks = ranks
        self._tell = tell
        self._compiles = compiles
        able = all(hasattr(one, name) for one in parameters for name in _NEEDED)
        fp32 = [one for one in parameters if able and one.orig_dtype is torch.float32]
        self._candidates: list[Any] = fp32  # none, once they are not to be lowered
        self._uses = Uses()
        self._device = next((one.device.type for one in parameters), "cpu")
        self._calls = 0  # under autocast
        self._why_not = ""  # all are to be gathered in their own type from the next call on
        # Between a forward pass and its backward pass, whose graph has gathered tensors.
        self._between = False
        self._reached: set[int] = set()  # calls through which the last backward pass went
        # What FSDP has of each lowered parameter for the precision that isn't in use.
        self._other: dict[Any, dict[str, Any]] = {}

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a training call of the root.

        Raises:
            SystemExit: ``fsdp-autocast`` if it can't be gathered in the precision of this call.
        """
        if not self._candidates:
            return run(*args, **kwargs)
        dtype = None
        if torch.is_autocast_enabled(self._device):
            dtype = torch.get_autocast_dtype(self._device)
        self.after_backward()
        if self._calls and dtype is not self._uses.dtype:
            if self._other and self._between:
                refuse(_in_two_precisions(type(self._ref()).__name__))
            self._raise("it is also called without autocast")
        if dtype is None or not self._candidates:
            return run(*args, **kwargs)
        self._begin(dtype)
        output = run(*args, **kwargs)
        if self._candidates:
            self._look_back_from(output)
        return output

    def _begin(self, dtype: torch.dtype) -> None:
        """Watch, lower or raise the parameters before a call under autocast."""
        self._calls += 1
        self._between, between = True, self._between
        if self._calls == 1:
            self._uses.dtype = dtype
            for at, one in enumerate(self._candidates):
                one.init_unsharded_param = functools.partial(_initialize, one, self._uses, at)
        if self._compiles() or (self._calls <= WATCHED + 1 and self._is_compiled()):
            self._uses.on, self._why_not = False, "a part of it is compiled"
        if between:
            return
        if self._other:
            self._agree()
        elif self._why_not:
            self._raise(self._why_not)
        elif self._calls > WATCHED:
            self._lower(dtype)

    def after_backward(self) -> None:
        """Note what a backward pass has gone through."""
        if len(self._reached) > 1 and not self._why_not:
            # Their gradients would be added up in low precision.
            self._why_not = "several of its calls end in one backward pass"
        self._reached.clear()
        # Whether it has used up what the calls before it have gathered.
        self._between = self._between and bool(self._state._comm_ctx.post_forward_order)

    @contextmanager
    def in_their_type(self) -> Iterator[None]:
        """Gather all parameters in their own type and unwatched, in a call that doesn't train."""
        self._exchange()
        self._uses.on, before = False, self._uses.on
        try:
            yield
        finally:
            self._uses.on = before
            self._exchange()

    def _look_back_from(self, output: Any) -> None:
        """Note through which of the calls a backward pass goes, and who uses a parameter."""
        nodes = {t.grad_fn for t in tensors_in(output) if t.grad_fn is not None}
        for node in nodes:
            node.register_prehook(functools.partial(_reach, self._reached, self._calls))
        if not self._other:
            places = {
                id(one._unsharded_param): at
                for at, one in enumerate(self._candidates)
                if hasattr(one, "_unsharded_param")
            }
            self._uses.otherwise |= _used_by_others(nodes, places)

    def _agree(self) -> None:
        """Gather all parameters in their own type if any rank has found a reason."""
        why = self._why_not
        if not why and self._uses.otherwise:
            name = self._name(self._candidates[min(self._uses.otherwise)].sharded_param)
            why = f"{name} is used otherwise than in a product of matrices"
        same = self._ranks.meet(1 + bool(why), lambda: why)
        if reasons := [text for text in ([why] if same else self._ranks.reports) if text]:
            self._raise(reasons[0])

    def _name(self, parameter: Tensor) -> str:
        module: Any = self._ref()
        names: Any = (name for name, p in module.named_parameters() if p is parameter)
        return str(next(names, "a parameter"))

    def _is_compiled(self) -> bool:
        module: Any = self._ref()
        return any(part._compiled_call_impl is not None for part in nn.Module.modules(module))

    def _lower(self, dtype: torch.dtype) -> None:
        """Gather those parameters in low precision that no rank has seen used otherwise."""
        known = range(len(self._candidates))
        own = [str(at) for at in known if not self._uses.only_rounded(at)]
        refused = {int(at) for text in self._ranks.gather(" ".join(own)) for at in text.split()}
        chosen = [one for at, one in enumerate(self._candidates) if at not in refused]
        self._leave(self._candidates)
        self._candidates, self._uses = chosen, Uses(dtype)
        for at, one in enumerate(chosen):
            one.init_unsharded_param = functools.partial(_initialize, one, self._uses, at)
            self._other[one] = {"param_dtype": dtype, "all_gather_outputs": []}
        self._exchange()
        name = str(dtype).removeprefix("torch.")
        if chosen:
            self._tell(
                f"{len(chosen)} of {len(known)} parameters are gathered in {name}, to which"
                " autocast rounds them anyway; their gradients are summed in fp32"
            )

    def _raise(self, why: str) -> None:
        """Gather all parameters in their own type from now on."""
        if self._other:
            self._tell(f"parameters are gathered in fp32 again: {why}")
        self._exchange()
        self._leave(self._candidates)
        self._other, self._candidates = {}, []

    def _leave(self, parameters: Iterable[Any]) -> None:
        """Leave parameters to FSDP alone."""
        for one in parameters:
            vars(one).pop("init_unsharded_param", None)
            if type(getattr(one, "_unsharded_param", None)) is _Watched:
                one._unsharded_param.__class__ = nn.Parameter

    def _exchange(self) -> None:
        """Exchange what FSDP has of the lowered parameters for the other precision."""
        for one, other in self._other.items():
            has = vars(one)
            self._other[one] = {name: has.pop(name) for name in _OF_PRECISION if name in has}
            has.update(other)


def _initialize(one: Any, uses: Uses, at: int) -> None:
    """Watch a gathered parameter, which FSDP calls this for."""
    type(one).init_unsharded_param(one)
    parameter: Any = one._unsharded_param
    kind = type(parameter)
    if kind is nn.Parameter:
        if parameter not in _NOTED and one.param_dtype is not None:
            # By a weak reference: no garbage collection looks for cycles through such hooks.
            accumulate = functools.partial(_accumulate, weakref.ref(one))
            parameter.register_post_accumulate_grad_hook(accumulate)
        _NOTED[parameter] = uses, at
    if kind in (nn.Parameter, _Watched):
        parameter.__class__ = _Watched if uses.on else nn.Parameter


def _accumulate(ref: weakref.ref[Any], parameter: Tensor) -> None:
    """Keep a low-precision gradient of a gathered parameter in fp32, for FSDP to reduce.

    At once, since several may be added up, such as those of checkpoints with reentry.
    """
    one = ref()
    assert one is not None
    assert parameter.grad is not None
    gradient, parameter.grad = parameter.grad.float(), None
    before = one.unsharded_accumulated_grad
    one.unsharded_accumulated_grad = gradient if before is None else before + gradient


def _reach(reached: set[int], call: int, _: Any) -> None:
    reached.add(call)


def _used_by_others(nodes: Iterable[Any], places: dict[int, int]) -> set[int]:
    """Return which parameters have derivatives by others than autocast's casts.

    They are used in a function of the script's own, by TorchScript or in a transform of
    torch.func's, where no ``__torch_function__`` is called.

    Args:
        nodes: From which the autograd graph is searched.
        places: The numbers of the parameters, by their ids.
    """
    seen: set[Any] = set()
    found: set[int] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for before, _ in node.next_functions:
            at = places.get(id(getattr(before, "variable", None)))
            if at is not None and not node.name().startswith(_CASTS):
                found.add(at)
            elif before is not None:
                pending.append(before)
    return found


class Uses:
    """How the gathered parameters of a root are used.

    Attributes:
        dtype: To which its calls autocast.
        on: False while uses don't count, and parameters aren't watched.
        rounded: The numbers of the parameters that were used where autocast rounds them.
        otherwise: Those of the parameters that were used elsewhere.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.on = True
        self.rounded: set[int] = set()
        self.otherwise: set[int] = set()

    def only_rounded(self, at: int) -> bool:
        """True if a parameter was used, and everywhere so that autocast rounds it."""
        return at in self.rounded and at not in self.otherwise


class _Watched(nn.Parameter):
    """A gathered parameter that notes how it is used.

    To the script it has the parameter's own type: where autocast doesn't round it, it is handed on
    in fp32.
    """

    noting = widening = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.widening and func == _DTYPE:
            return torch.float32
        given = args, kwargs or {}
        own: Any = [t for t in tensors_in(given) if type(t) is _Watched]
        for parameter in own:
            parameter.__class__ = nn.Parameter  # so that torch does what it always does
        try:
            if func not in _UNREAD:
                given = cls._used(func, given, own)
            return func(*given[0], **given[1])
        finally:
            for parameter in own:
                parameter.__class__ = _Watched

    @classmethod
    def _used(cls, func: Any, given: Any, own: list[Any]) -> Any:
        """Note a function's use of parameters, and return what it is to be given."""
        rounded, dtypes = _rounded_by(func, *given)
        wide: set[int] = set()
        for parameter in own:
            uses, at = _NOTED[parameter]
            rounds = id(parameter) in rounded and dtypes == {uses.dtype}
            if cls.noting:
                (uses.rounded if rounds else uses.otherwise).add(at)
            if cls.widening and not rounds and parameter.dtype is not torch.float32:
                wide.add(id(parameter))
        return map_tensors(given, lambda t: t.float() if id(t) in wide else t) if wide else given


def _rounded_by(func: Any, args: Any, kwargs: Any) -> tuple[set[int], set[Any]]:
    """Return the ids of the tensors that a function uses rounded, and to which types."""
    if func is _ATTENTION:
        arguments = inspect.signature(func).bind(*args, **kwargs).arguments
        handed: Any = [arguments.get(name) for name in _OF_ATTENTION]
    elif func in _ROUNDED:
        handed = args, kwargs
    else:
        return set(), set()
    devices = {t.device.type for t in tensors_in((args, kwargs)) if t.is_floating_point()}
    dtypes = {
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in devices
    }
    return {id(t) for t in tensors_in(handed)}, dtypes


@contextmanager
def unwatched() -> Iterator[None]:
    """Leave gathered parameters as they are in the block, whose use of them isn't the script's."""
    before = _Watched.noting, _Watched.widening
    _Watched.noting = _Watched.widening = False
    try:
        yield
    finally:
        _Watched.noting, _Watched.widening = before


@contextmanager
def widened() -> Iterator[None]:
    """Run the block, a trial without autocast, with fp32 copies of lowered parameters."""
    before, _Watched.noting = _Watched.noting, False
    try:
        yield
    finally:
        _Watched.noting = before


# As the script sees its type
_Watched.__name__, _Watched.__qualname__ = nn.Parameter.__name__, nn.Parameter.__qualname__


def _in_two_precisions(name: str) -> FasttrainError:
    return FasttrainError(
        f"--strategy fsdp can't call {name} without autocast before the backward pass of a call"
        " under autocast",
        why="its parameters are gathered in low precision until that backward pass: no earlier"
        " pass went through calls of both kinds",
        fix="use --amp off and no autocast, or --strategy ddp",
        slug="fsdp-autocast",
    )
