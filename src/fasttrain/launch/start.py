"""Runs a plan from its directory to its receipt."""

from __future__ import annotations

from collections.abc import Mapping

from fasttrain.launch.attend import Around, Part, attend, compose
from fasttrain.launch.preflight import check_port, find_program
from fasttrain.launch.receipts import gather
from fasttrain.launch.run_dir import create
from fasttrain.spec.outcome import Receipt
from fasttrain.spec.plan import LaunchPlan


def start(
    plan: LaunchPlan, masked: LaunchPlan, environ: Mapping[str, str], around: Around
) -> Receipt:
    """Start this node's processes, stay with them, and give the receipt.

    Args:
        plan: What to start.
        masked: The same without secrets; all that is written to disk comes from it.
        environ: The environment as the user has it.
        around: Who follows the run.

    Raises:
        FasttrainError: Nothing could be started.
    """
    environment = compose(environ, plan.environment)
    program = find_program(plan, environment)
    check_port(plan.processes.value)
    create(masked)
    ended = attend(Part(plan, masked, program, environ, environment), around)
    return gather(masked, ended.exit_code, ended.wall_s, ended.warnings, ended.crash)
