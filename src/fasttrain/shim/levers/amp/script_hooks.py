"""Lets the script's hooks work inside a root that runs in low precision.

A forward hook gets its module's output in fp32, and so do the modules after it. What a script keeps
there, for a loss, a projection or a plot, is used together with its own fp32 tensors outside of the
root. A gradient hook that fails on low-precision gradients is called again with fp32 ones.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.amp import autocast
from torch.nn import Module

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.call_state import one_line
from fasttrain.shim.hooks.containers import to_float32
from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.gradients import Hook, wrap_module_hooks, wrap_tensor_hooks
from fasttrain.shim.hooks.roots import in_backward
from fasttrain.shim.hooks.seams import Applying, Hooking
from fasttrain.shim.levers.amp.repeat import may_explain, names_types

# Runs the script's own `torch.autograd.Function` forward and backward in one precision.
#
# Autocast doesn't cover backward passes: a matrix product in the backward of a custom Function
# would get fp32 tensors together with low-precision ones that its forward has saved. Such a
# Function runs in fp32, as with `torch.amp.custom_fwd`. One that gets modules or functions as
# arguments may be a checkpoint, which repeats its forward in backward: both stay in low
# precision.
#
# Torch's own Functions and those of installed packages, which may need low precision, are
# unchanged.


_RAN_ON = "_fasttrain_autocast_device"  # set on a Function's context


class _Here(threading.local):
    device = ""


class Region:
    """What of the script runs in low precision: the calls of roots, and what repeats parts of them.

    Attributes:
        lowered_on: Device type of the last call of a root in low precision, in any thread; empty
            before the first one.
    """

    def __init__(self) -> None:
        self.lowered_on = ""
        self._here = _Here()

    @property
    def device(self) -> str:
        """The device type of the root's call that this thread is in; empty outside of any."""
        return self._here.device

    def enter(self, device: str) -> None:
        """Begin a root's call in this thread."""
        self._here.device = self.lowered_on = device

    def leave(self) -> None:
        """End it."""
        self._here.device = ""

    def where(self) -> str:
        """Return the device type of what this thread computes for a root; empty if it doesn't.

        A checkpoint repeats a part of a root's forward in a backward pass, which may run in another
        thread, under the autocast that was around it. It has to do all that the forward did, or
        what is saved differs.
        """
        here = self._here.device
        if here or torch.compiler.is_compiling() or not in_backward():
            return here
        on = self.lowered_on
        return on if on and torch.is_autocast_enabled(on) else ""


class CustomFunctions:
    """Wraps ``Function.apply``, and the call of a Function's backward.

    Args:
        dtype: The low precision.
        lowered: Returns a context of the autocast of roots, for a device type.
    """

    def __init__(
        self, dtype: torch.dtype, lowered: Callable[[str], AbstractContextManager[Any]]
    ) -> None:
        self.region = Region()
        self._dtype = dtype
        self._lowered = lowered
        self._scripts: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

    def install(self, undo: ExitStack) -> None:
        """Put the replacements in place."""
        for helper in (CustomFunctions._is_scripts, _holds_code, _marked):
            pass_over(helper)
        function: Any = torch.autograd.Function
        patching.wrap(function, "apply", self._applied, undo, Applying.AMP)
        backward: Any = torch.autograd.function.BackwardCFunction
        for name in ("apply", "apply_boxed"):
            if hasattr(backward, name):
                patching.wrap(backward, name, self._repeated, undo)

    def _applied(self, method: Any) -> Any:
        # A classmethod; since torch 2.14 one that C has made, which refers to no function.
        def original(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return method.__get__(None, cls)(*args, **kwargs)

        pass_over(original)

        @functools.wraps(method.__get__(None, torch.autograd.Function))
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            device = self.region.where()
            if not device or not torch.is_autocast_enabled(device) or not self._is_scripts(cls):
                return original(cls, *args, **kwargs)
            if any(map(_holds_code, args)):
                return _marked(original(cls, *args, **kwargs), cls, device)
            with autocast(device, enabled=False):
                lifted = to_float32(args, self._dtype)
                output = original(cls, *lifted, **kwargs)
            for given, used in zip(args, lifted, strict=True):
                if used is not given and isinstance(used, Tensor) and used._version:
                    given.copy_(used)  # the Function changed it in place
            return output

        pass_over(apply)
        return classmethod(apply)

    def _repeated(self, original: Any) -> Any:
        @functools.wraps(original)
        def apply(context: Any, *args: Any) -> Any:
            device = getattr(context, _RAN_ON, None)
            if device is None:
                return original(context, *args)
            with self._lowered(device):
                return original(context, *args)

        pass_over(apply)
        return apply

    def _is_scripts(self, cls: type) -> bool:
        """True if a Function is the user's own: neither torch's nor of an installed package."""
        known = self._scripts.get(cls)
        if known is None:
            module = sys.modules.get(cls.__module__)
            path = getattr(module, "__file__", None) or ""
            own = cls.__module__.startswith(("torch.", "fasttrain."))
            known = not own and "site-packages" not in path
            self._scripts[cls] = known
        return known


def _holds_code(argument: Any) -> bool:
    if isinstance(argument, list | tuple):
        return any(map(_holds_code, argument))
    return callable(argument) and not inspect.isclass(argument)


def _marked(output: Any, cls: Any, device: str) -> Any:
    for tensor in output if isinstance(output, tuple) else (output,):
        node = tensor.grad_fn if isinstance(tensor, Tensor) else None
        if isinstance(node, cls._backward_cls):
            setattr(node, _RAN_ON, device)
    return output


# Lets the script's hooks work inside a root that runs in low precision.


PLACES = {"register_forward_pre_hook": "inputs", "register_forward_hook": "output"}


class Hooks:
    """Wraps hooks on modules and on gradients when they are registered.

    Args:
        dtype: The low precision.
        region: What runs in low precision.
        note: Adds one detail to the receipt.
    """

    def __init__(self, dtype: torch.dtype, region: Region, note: Callable[[str], None]) -> None:
        self._dtype = dtype
        self._region = region
        self._note = note

    def install(self, undo: ExitStack) -> None:
        """Put the replacements in place."""
        wrap_tensor_hooks("register_hook", self._on_gradients, undo, Hooking.AMP)
        wrap_module_hooks(self._on_gradients, undo, Hooking.AMP)
        for name, place in PLACES.items():
            make = functools.partial(self._watched, place)
            patching.wrap(Module, name, make, undo, Hooking.AMP)
        scripting: Any = torch.jit._recursive
        if hasattr(scripting, "get_hook_stubs"):
            patching.wrap(scripting, "get_hook_stubs", _of_the_script, undo)

    def _watched(self, place: str, original: Any) -> Any:
        @functools.wraps(original)
        def register(module: Module, hook: Hook, *args: Any, **kwargs: Any) -> Any:
            if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                hook = Lifting(hook, place, self._dtype, self._region)
            return original(module, hook, *args, **kwargs)

        return register

    def _on_gradients(self, hook: Hook) -> Hook:
        @functools.wraps(hook)
        def wrapped(*args: Any) -> Any:
            try:
                return hook(*args)
            except Exception as error:
                lifted = to_float32(args, self._dtype)
                fits = may_explain(error, self._dtype) and names_types(error, self._dtype)
                if lifted is args or not fits:
                    raise
                failure = one_line(error)
            result = hook(*lifted)
            self._note(f"a gradient hook failed in low precision and ran again in fp32: {failure}")
            return self._lowered(result, args, lifted)

        return wrapped

    @staticmethod
    def _lowered(result: Any, given: tuple[Any, ...], lifted: tuple[Any, ...]) -> Any:
        """Return a hook's result in the precision of the gradients that it replaces."""
        gradient = given[0]
        if isinstance(gradient, Tensor):
            if result is None and not lifted[0]._version:
                return None
            # Some hooks change their argument in place, against torch's advice.
            return (lifted[0] if result is None else result).to(gradient.dtype)
        if not isinstance(result, tuple):
            return result
        return tuple(
            new.to(old.dtype) if isinstance(new, Tensor) and isinstance(old, Tensor) else new
            for new, old in zip(result, given[1], strict=False)
        )


def _of_the_script(original: Any) -> Any:
    """Have torch.jit.script, which reads the source of a module's hooks, see the script's own."""

    @functools.wraps(original)
    def get_hook_stubs(module: Module) -> Any:
        places = [(d, k, h) for d in _hooks_of(module) for k, h in d.items() if type(h) is Lifting]
        for hooks, key, lifting in places:
            hooks[key] = lifting._hook
        try:
            return original(module)
        finally:
            for hooks, key, lifting in places:
                hooks[key] = lifting

    return get_hook_stubs


def _hooks_of(module: Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_hooks, module._forward_pre_hooks


# What dynamo would trace as what it seems to be, past the wrapper.
_TRACED = (FunctionType, MethodType, BuiltinFunctionType, functools.partial, Module)


class Lifting:
    """Wraps a forward hook, which gets fp32 tensors; a pickle of it is the hook itself.

    Who looks through a module's hooks finds the script's by its class, attributes and equality:
    pruning looks for its methods so.
    """

    def __init__(self, hook: Hook, place: str, dtype: torch.dtype, region: Region) -> None:
        self._hook = hook
        self._place = place
        self._dtype = dtype
        self._region = region

    def __call__(self, module: Module, *given: Any) -> Any:
        """Call the hook with torch's arguments: inputs, keyword arguments, output."""
        if not self._region.where():
            return self._hook(module, *given)
        at = 0 if self._place == "inputs" else len(given) - 1
        lifted = to_float32(given[at], self._dtype)
        shown = (*given[:at], lifted, *given[at + 1 :])
        result = self._hook(module, *shown)
        if result is not None or lifted is given[at]:
            return result
        # A pre-hook that takes keyword arguments returns both.
        return lifted if len(shown) == 1 or at else shown

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        hook = vars(self).get("_hook")
        return Lifting if hook is None or isinstance(hook, _TRACED) else type(hook)

    def __getattr__(self, name: str) -> Any:
        if "_hook" not in vars(self):  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._hook, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._hook == (other._hook if type(other) is Lifting else other))

    def __hash__(self) -> int:
        return hash(self._hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Lifting:
        return Lifting(copy.deepcopy(self._hook, memo), self._place, self._dtype, self._region)

    def __reduce__(self) -> Any:
        return copy.copy, (self._hook,)
