"""Runs a plan from its directory to its receipt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fasttrain.launch.node_run import Around, Part
from fasttrain.launch.preflight import check_port, find_program
from fasttrain.launch.report.receipts import gather
from fasttrain.launch.run_dir.cache import secure_cache
from fasttrain.launch.run_dir.lock import begin, claim
from fasttrain.launch.run_node import attend, compose
from fasttrain.model.codec import dumps
from fasttrain.model.outcome import Receipt
from fasttrain.model.plan import PLAN_FILE, LaunchPlan


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
    with claim(plan.run_dir, plan.preempt.value.resume) as claimed:
        told = (*claimed.warnings, *secure_cache(plan, environment))
        for warning in told:
            around.display.tell(f"warning: {warning}")
        begin(claimed, PLAN_FILE, dumps(masked))
        ended = attend(Part(plan, masked, program, environ, environment), around)
        return gather(masked, replace(ended, warnings=(*told, *ended.warnings)))
