"""Hides secrets in a plan before it is written or shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fasttrain.model.plan import EnvVar, LaunchPlan
from fasttrain.model.secrets import hide, mask_args, mask_value, secrets_of


def mask_plan(plan: LaunchPlan, environ: Mapping[str, str] | None = None) -> LaunchPlan:
    """Return the plan with ``***`` for secrets in variables and in the script's arguments.

    Args:
        plan: The plan.
        environ: The user's environment, whose secrets may be in the arguments as well.
    """
    values = secrets_of(plan, environ or {})
    args = mask_args(plan.target.args, values)
    own = len(plan.argv) - len(args)  # the script's arguments are the last ones
    return replace(
        plan,
        environment=tuple(_mask_variable(variable, values) for variable in plan.environment),
        target=replace(plan.target, args=args),
        argv=(*plan.argv[:own], *args),
    )


def _mask_variable(variable: EnvVar, values: tuple[str, ...]) -> EnvVar:
    if variable.value is None:
        return variable
    shown = mask_value(variable.name, variable.value, values)
    return replace(variable, value=shown, reason=hide(variable.reason, values))
