"""Hides secrets in a plan before it is written or shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fasttrain.spec.plan import EnvVar, LaunchPlan
from fasttrain.spec.secrets import MASK, is_secret_name

_SECRET_WORDS = frozenset({"token", "key", "apikey", "secret", "password", "passwd"})
# apiKey counts as two words, as api-key and api_key do.
_WORD_ENDS = re.compile(r"[-_.]|(?<=[a-z])(?=[A-Z])")


def mask_plan(plan: LaunchPlan) -> LaunchPlan:
    """Give the plan with secret values of variables and of script arguments as ``***``."""
    return replace(
        plan,
        environment=tuple(_mask_variable(variable) for variable in plan.environment),
        target=replace(plan.target, args=mask_args(plan.target.args)),
        argv=mask_args(plan.argv),
    )


def mask_args(args: Iterable[str]) -> tuple[str, ...]:
    """Give the arguments with the values of secret options masked.

    Both ``--api-key X`` and ``--api-key=X`` are known, and ``wandb.api_key=X``; by its last word,
    so that ``--tokenizer``, ``--key-dim`` and ``--num-tokens`` keep theirs.
    """
    return tuple(_masked(args))


def _masked(args: Iterable[str]) -> Iterator[str]:
    expect_secret = False
    for arg in args:
        if expect_secret and not arg.startswith("--"):
            yield MASK
            expect_secret = False
            continue
        name, equals, _value = arg.partition("=")
        secret = _WORD_ENDS.split(name)[-1].lower() in _SECRET_WORDS
        expect_secret = secret and not equals and arg.startswith("-")
        yield f"{name}={MASK}" if secret and equals else arg


def _mask_variable(variable: EnvVar) -> EnvVar:
    if variable.value is None or not is_secret_name(variable.name):
        return variable
    return replace(variable, value=MASK)
