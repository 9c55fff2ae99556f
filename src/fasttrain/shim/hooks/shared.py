"""What the levers of one worker share, from which each is built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.hooks.outcome_recorder import Ledger
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.hooks.user_compile import OwnCompile


@dataclass(slots=True)
class Shared:
    """Handed to the ``build(shared, decision, ledger)`` of each module that a lever's row names.

    Attributes:
        plan: The plan.
        roots: Calls of roots.
        own_compile: What the script compiles itself.
        meter: Steps and their times.
        lever_state: What a snapshot has to hold: a ``LeverState`` of ``data_parallel``.
        undo: Takes away what is put in place before the levers are installed.
        companion: Makes the ledger of a part with a line of its own in the receipt, by its name,
            what is asked of it, the decision that it follows, and whether a person named it.
        on_compiling: Called with the name of a root when compiling begins in it, and with an empty
            one when that has ended.
        compile_s: Seconds spent compiling so far.
        loss_scale: The present loss scale; None without loss scaling.
        stepped_elsewhere: Each true of an optimizer whose steps another lever makes.
    """

    plan: LaunchPlan
    roots: RootCalls
    own_compile: OwnCompile
    meter: StepMeter
    lever_state: Any
    undo: ExitStack
    companion: Callable[..., Ledger]
    on_compiling: list[Callable[[str], None]] = field(default_factory=list)
    compile_s: Callable[[], float] = lambda: 0.0
    loss_scale: Callable[[], float] | None = None
    stepped_elsewhere: list[Callable[[Optimizer], bool]] = field(default_factory=list)
