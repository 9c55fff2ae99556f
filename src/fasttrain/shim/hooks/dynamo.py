"""Finds what the script compiles itself: no lever sees a call inside a compiled graph."""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import Module

from fasttrain.shim.hooks import patching
from fasttrain.shim.process.callsite import call_site

# Keeps torch.compile from compiling fasttrain's own functions, which run between graphs.


def pass_over(function: Any, *, all_it_calls: bool = False) -> None:
    """Have dynamo skip a function's own frame, as it skips those of torch.nn.

    After a graph break dynamo compiles every frame that runs. Whatever a wrapper of ours is called
    with would count against the one recompile limit of its code object.

    Args:
        function: A Python function.
        all_it_calls: Skip the functions that it calls, too.

    Source: ``torch/_dynamo/eval_frame.py`` of torch 2.13, ``skip_code``; up to 2.5 it is in C.
    """
    frames: Any = torch._C._dynamo.eval_frame  # torch._dynamo itself is not imported for this
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        inside = action.SKIP if all_it_calls else action.DEFAULT
        strategy = frames._FrameExecStrategy(action.SKIP, inside)
        frames.set_code_exec_strategy(function.__code__, strategy)
    elif hasattr(frames, "skip_code"):
        frames.skip_code(function.__code__)


def tell_of_compilation(undo: ExitStack) -> None:
    """Have ``torch.compiler.is_compiling`` tell of all that runs while dynamo compiles.

    Before torch 2.13 it is true in traced code alone, and not in what AOTAutograd and inductor
    call, such as ``torch.autograd.grad``.

    Args:
        undo: Takes the inverse.

    Source: ``compile_inner`` in ``torch/_dynamo/convert_frame.py`` of torch 2.13.
    """
    compiler: Any = torch.compiler
    if hasattr(compiler, "_compile_session_context"):
        return
    frames: Any = importlib.import_module("torch._dynamo.convert_frame")
    if hasattr(frames._compile, "tells"):
        return
    compile_frame = frames._compile

    @functools.wraps(compile_frame)
    def compile_and_tell(*args: Any, **kwargs: Any) -> Any:
        before, compiler._is_compiling_flag = compiler._is_compiling_flag, True
        try:
            return compile_frame(*args, **kwargs)
        finally:
            compiler._is_compiling_flag = before

    compile_and_tell.tells = True  # type: ignore[attr-defined]
    patching.put(frames, "_compile", compile_and_tell, undo)


class UserCompile:
    """Watches torch.compile.

    Attributes:
        where: The first place where the script compiles something.
        what: What it compiles there.
        functions: Whether it compiles anything but modules with parameters.
        sites: Where each module was compiled.
        on_module: Called with each module that the script compiles, before it is compiled.
        on_return: Called when torch.compile returns.
    """

    def __init__(self) -> None:
        self.what = self.where = ""
        self.functions = False
        self.sites: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()
        self.on_module: list[Callable[[Module, str], None]] = []
        self.on_return: list[Callable[[], None]] = []

    def install(self, undo: ExitStack) -> None:
        """Replace torch.compile by a function that looks and passes on."""
        self._undo = undo
        patching.wrap(torch, "compile", self._watched, undo)

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 - torch's name
            subject = args[0] if args else kwargs.get("model")
            if subject is None:  # with options only, as a decorator: it will be called again
                return original(*args, **kwargs)
            module = getattr(subject, "__self__", subject)  # model.forward, or the model
            site = call_site(past=torch.compile)
            self._remember(module, site)
            self.functions |= (
                not isinstance(module, Module) or next(module.parameters(), None) is None
            )
            if isinstance(module, Module):
                self.sites[module] = site
                for listen in self.on_module:
                    listen(module, site)
            tell_of_compilation(self._undo)
            result = original(*args, **kwargs)
            if isinstance(module, Module) and isinstance(result, Module):
                self.sites[result] = site
            for call in self.on_return:
                call()
            return result

        return compile

    def _remember(self, subject: Any, site: str) -> None:
        if not self.where:
            name = getattr(subject, "__name__", type(subject).__name__)
            self.what, self.where = name, site
