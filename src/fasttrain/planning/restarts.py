"""Decides what becomes of a run that fails."""

from __future__ import annotations

from fasttrain.model.decision import Decision
from fasttrain.model.guards import Restarts
from fasttrain.model.plan import Processes
from fasttrain.model.settings import Settings
from fasttrain.planning.sources import asked


def decide_restarts(settings: Settings, processes: Processes) -> Decision[Restarts]:
    """Return how often a run is started again, after what, and after how long."""
    most, on = settings.max_restarts, settings.restart_on
    if processes.backend == "slurm":
        reason = "a rank that SLURM started is not started again without the others"
        return Decision(Restarts(0, on.value), reason, most.source)
    if not most.value:
        return Decision(Restarts(0, on.value), asked(most), most.source)
    restarts = Restarts(most.value, on.value)
    what = "after any failure" if on.value == "any" else "after recoverable failures"
    # Doubled as Kubernetes does for containers that fail, up to the same limit.
    # Source: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle, CrashLoopBackOff
    reason = (
        f"{what}, {restarts.first_s:g} s later, and twice as long as before where it made no step,"
        f" up to {restarts.cap_s:g} s"
    )
    return Decision(restarts, reason, most.source)
