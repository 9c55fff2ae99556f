"""Hides secrets in a plan before it is written or shown."""

from __future__ import annotations

from dataclasses import replace

from fasttrain.spec.plan import EnvVar, LaunchPlan
from fasttrain.spec.secrets import MASK, is_secret_name, mask_args


def mask_plan(plan: LaunchPlan) -> LaunchPlan:
    """Give the plan with secret values of variables and of script arguments as ``***``."""
    return replace(
        plan,
        environment=tuple(_mask_variable(variable) for variable in plan.environment),
        target=replace(plan.target, args=mask_args(plan.target.args)),
        argv=mask_args(plan.argv),
    )


def _mask_variable(variable: EnvVar) -> EnvVar:
    if variable.value is None or not is_secret_name(variable.name):
        return variable
    return replace(variable, value=MASK)
