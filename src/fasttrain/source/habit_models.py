"""Signs of what a script does with its models and optimizers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fasttrain.source.habit_context import Context, Sign, is_literal, literal, subject
from fasttrain.source.habits import Habit
from fasttrain.source.names import chain, part_of

# What a script can ask of an optimizer's implementation, and for which of them False is a choice.
_CHOICES = {"fused": True, "foreach": True, "capturable": False, "differentiable": False}
_DTYPES = {"double": "float64", "half": "float16", "bfloat16": "bfloat16"}


def optimizers(here: Context, call: ast.Call) -> Iterator[Sign]:
    """Give optimizers by their class, and what the script asks of their implementation."""
    kinds = [name for name in here.kinds(call.func) if _is_optimizer(name)]
    if not kinds:
        return
    known = kinds[0].rpartition(".")[2]
    own = kinds[0] not in here.of(call.func)  # a class of the user's that derives from torch's
    yield Habit.OPTIMIZER, f"{chain(call.func)[-1]}({known})" if own else known, True
    for keyword in call.keywords:
        shown = ast.unparse(keyword.value)
        if keyword.arg is None:
            yield Habit.IMPLEMENTATION, f"**{shown}", False
        elif keyword.arg in _CHOICES:
            value = literal(keyword.value)
            chosen = value is True or (value is False and _CHOICES[keyword.arg])
            if chosen or not is_literal(keyword.value):
                yield Habit.IMPLEMENTATION, f"{keyword.arg}={shown}", chosen


def _is_optimizer(name: str) -> bool:
    """Whether a full name is that of a class of torch's optimizers."""
    module, _, last = name.rpartition(".")
    others = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")
    return f"{module}.".startswith("torch.optim.") and module not in others and last[:1].isupper()


def models(here: Context, call: ast.Call) -> Iterator[Sign]:
    """Give what is done with a whole model."""
    names, what = here.of(call.func), subject(call)
    if what is not None:
        is_model, shown = here.is_model(what), ast.unparse(what)
        if "torch.compile" in names:
            yield Habit.COMPILE, shown, is_model
        elif "torch.save" in names and is_model:
            yield Habit.WHOLE_MODEL, shown, True
        elif "copy.deepcopy" in names and is_model:
            yield Habit.DEEPCOPY, shown, True
        elif "torch.set_default_dtype" in names and _dtype(here, what) == "float64":
            yield Habit.DTYPE, "float64", True
    if isinstance(call.func, ast.Attribute) and here.changes_model(call):
        yield from _methods(here, call, call.func)


def _methods(here: Context, call: ast.Call, method: ast.Attribute) -> Iterator[Sign]:
    if method.attr in _DTYPES and not call.args:
        yield Habit.DTYPE, _DTYPES[method.attr], True
    elif method.attr == "to":
        for argument in (*call.args, *(k.value for k in call.keywords)):
            if dtype := _dtype(here, argument):
                yield Habit.DTYPE, dtype, True
    elif method.attr == "compile" and here.is_model(method.value):
        yield Habit.COMPILE, ast.unparse(method.value), True


def _dtype(here: Context, node: ast.expr) -> str:
    """Give a floating dtype other than float32 that is named; empty for anything else."""
    named = part_of(here.of(node), "torch", (*_DTYPES, *_DTYPES.values()))
    return _DTYPES.get(named, named)
