"""Findings about a script before it runs here, for its author.

Only what the source shows outside of conditions is judged, and each habit once, at its first place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fasttrain.doctor.script_levers import FUSIBLE, LeverLine, amp, lever_lines
from fasttrain.model.levers import Amp
from fasttrain.model.machine import Finding, Machine, Severity
from fasttrain.model.outcome import State
from fasttrain.model.plan import Evidence, LaunchPlan, ScriptFacts
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.describe import and_join, counted
from fasttrain.planning.levers.amp import FP16
from fasttrain.source.habits import Habit, Habits

_OUTCOMES = {
    State.CEDED: "left to the script",
    State.SKIPPED: "can't be applied",
    State.FAILED: "the run would be refused",
    State.ARMED: "only a run can tell",
}
_FIXES = {
    ("amp", State.CEDED): "nothing; or remove the script's own mixed precision",
    ("amp", State.FAILED): "use --amp bf16 or --amp off",
    ("compile", State.CEDED): "nothing; or remove the script's own torch.compile",
    ("compile", State.SKIPPED): "use --compile off",
    ("optimizer", State.CEDED): "nothing; or remove that argument",
    ("optimizer", State.SKIPPED): f"nothing; {and_join(FUSIBLE)} have such kernels",
    ("matmul", State.CEDED): "nothing; or remove that line",
}
_TRY = "run it with --max-steps 20, and read the receipt"

# ROCm builds of torch use CUDA's names.
_CUDA = tuple(kind for kind, vendor in VENDORS.items() if vendor.torch_type == "cuda")

Judge = Callable[[Habits, LaunchPlan, Machine], Iterator[Finding]]


def judge_script(
    habits: Habits, facts: ScriptFacts, plan: LaunchPlan, machine: Machine
) -> tuple[Finding, ...]:
    """Return findings about a script before it runs here.

    Args:
        habits: What its source shows.
        facts: Whether it handles ranks, and which modules could not be read.
        plan: The plan of a run.
        machine: The machine of the run.
    """
    return (
        *_prevented_levers(plan, habits),
        *_fp16_instead(plan, habits),
        *_ranks(facts, plan),
        *_habits(habits, plan, machine),
        *_unread(facts),
    )


def _prevented_levers(plan: LaunchPlan, habits: Habits) -> Iterator[Finding]:
    """Yield a finding for each lever that the script prevents, or may prevent."""
    for line in lever_lines(plan, habits):
        if not line.where or line.value == "keep":
            continue
        yield Finding(
            f"script-{line.lever}",
            _severity(line, plan),
            f"{line.lever} {line.value}: {_OUTCOMES[line.verdict]}",
            line.why,
            _FIXES.get((line.lever, line.verdict), _TRY),
            line.where,
        )


def _fp16_instead(plan: LaunchPlan, habits: Habits) -> Iterator[Finding]:
    """Yield a finding if the plan hints at fp16, and the script would take it."""
    hint = next((hint for hint in plan.hints if FP16 in hint), "")
    asked = replace(plan.levers.amp, value=Amp("float16", plan.device_kind.value))
    in_fp16 = replace(plan, levers=replace(plan.levers, amp=asked))
    if hint and amp(in_fp16, habits).state is State.APPLIED:
        yield Finding(
            "script-amp", "hint", f"amp off: {plan.levers.amp.reason}", hint, f"use {FP16}"
        )


def _severity(line: LeverLine, plan: LaunchPlan) -> Severity:
    """Return error if the run is refused, warning if the user asked for the lever, else hint."""
    if line.verdict is State.FAILED:
        return "error"
    explicit = getattr(plan.levers, line.lever).source.explicit
    return "warning" if explicit and line.verdict is not State.ARMED else "hint"


def _ranks(facts: ScriptFacts, plan: LaunchPlan) -> Iterator[Finding]:
    found, strategy = facts.handles_ranks, plan.levers.strategy.value
    if found and strategy.injected:
        yield Finding(
            "script-strategy",
            "warning",
            f"--strategy {strategy.mode} for a script that handles its ranks itself",
            f"the script uses {found.what}, and only one of the two can average gradients",
            "use --strategy auto, which leaves the ranks to the script",
            found.where,
        )


def _unread(facts: ScriptFacts) -> Iterator[Finding]:
    if facts.unread:
        first = facts.unread[0]
        yield Finding(
            "script-unread",
            "hint",
            f"{counted(len(facts.unread), 'module')} of the script's could not be read: {first}",
            "this report says nothing about them",
            "fix them, or compare with the receipt of a run",
        )


# Habits that cost speed, or fail, with or without fasttrain.


def _habits(habits: Habits, plan: LaunchPlan, machine: Machine) -> Iterator[Finding]:
    """Yield habits that cost speed or fail, the gravest first within each topic."""
    for judge in _JUDGES:
        yield from judge(habits, plan, machine)


def _bound_to_cuda(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    found, kind = habits.sure(Habit.DEVICE), plan.device_kind.value
    if not found or kind in _CUDA:
        return
    stand_in = VENDORS[kind].cuda_stand_in
    where = f"without `{stand_in}`, " if stand_in else ""
    yield Finding(
        "script-device",
        "hint" if stand_in else "warning",
        f"{found.what} is CUDA's, and the run is on {kind}",
        f"{where}torch raises where the script gets there",
        stand_in or 'use torch.device("cuda" if torch.cuda.is_available() else "cpu")',
        found.where,
    )


def _absent_device(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    if plan.device_kind.value not in _CUDA:
        return
    seen = _seen_by_a_worker(plan)
    named = [e for e in habits.of(Habit.DEVICE) if e not in habits.open and _number(e.what) >= seen]
    for found in named[:1]:
        yield Finding(
            "script-device",
            "warning",
            f"{found.what} is named, and each process sees {counted(seen, 'GPU')}",
            "torch raises where the script gets there: invalid device ordinal",
            'use "cuda", which is the process\'s own GPU',
            found.where,
        )


def _seen_by_a_worker(plan: LaunchPlan) -> int:
    """Return the number of devices that a process can name."""
    return 1 if plan.levers.strategy.value.visibility else len(plan.devices.value)


def _number(what: str) -> int:
    number = what.partition(":")[2]
    return int(number) if number.isdecimal() else 0


def _visible(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    found = habits.sure(Habit.VISIBLE)
    if not found or VENDORS[plan.device_kind.value].visibility != "CUDA_VISIBLE_DEVICES":
        return
    several = plan.processes.value.nproc_per_node > 1
    if plan.levers.strategy.value.visibility:
        yield Finding(
            "script-visible",
            "hint",
            f"the script sets {found.what} itself",
            "each process keeps its own GPU all the same",
            "remove the line, and choose GPUs with --gpus",
            found.where,
        )
    elif several or plan.devices.source.explicit:
        yield Finding(
            "script-visible",
            "warning",
            f"the script sets {found.what} itself",
            f"all {plan.processes.value.nproc_per_node} processes would share those GPUs"
            if several
            else f"that overrides {plan.devices.source}",
            "remove the line, and choose GPUs with --gpus",
            found.where,
        )


def _data_parallel(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    found = habits.sure(Habit.DATA_PARALLEL)
    if found and plan.device_kind.value in _CUDA and _seen_by_a_worker(plan) > 1:
        yield Finding(
            "script-data-parallel",
            "warning",
            "nn.DataParallel drives all GPUs from one process",
            "it copies the model to each of them in every step; torch recommends against it",
            "remove it, and start one process for each GPU with --gpus all",
            found.where,
        )


def _sync_bn(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    # Source: torch/nn/modules/batchnorm.py of torch 2.13, SyncBatchNorm.forward.
    found = habits.sure(Habit.SYNC_BN)
    if found and plan.device_kind.value == "cpu" and plan.processes.value.world_size > 1:
        yield Finding(
            "script-sync-bn",
            "warning",
            "SyncBatchNorm has no CPU kernels, and the run is on the CPU",
            "with a process group, torch raises in its first training step",
            "remove it; with several ranks fasttrain computes BatchNorm's statistics over the"
            " whole batch anyway, unless the script handles ranks itself",
            found.where,
        )


def _sync_bn_compiled(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    # Source: https://github.com/pytorch/pytorch/issues/161302
    levers, found = plan.levers, habits.sure(Habit.SYNC_BN)
    compiles = levers.compile.value.mode != "off" or habits.sure(Habit.COMPILE)
    if not found or not compiles or plan.processes.value.world_size == 1:
        return
    # If the worker makes the script data-parallel, removing it would change nothing.
    if plan.device_kind.value != "cpu" and not levers.strategy.value.injected:
        yield Finding(
            "script-sync-bn",
            "hint",
            "SyncBatchNorm breaks the compiled graph at each BatchNorm",
            "torch.compile can't compile the communication between ranks there, and compiles"
            " the parts between two of them separately",
            "remove SyncBatchNorm if a rank's part of a batch is large enough for its own"
            " statistics, or compare with --compile off",
            found.where,
        )


def _anomaly(habits: Habits, _plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    # Source: torch/autograd/anomaly_mode.py of torch 2.13.
    if found := habits.sure(Habit.ANOMALY):
        yield Finding(
            "script-anomaly",
            "warning",
            "anomaly detection is on",
            "its checks slow training down; torch has it for debugging",
            f"remove {found.what}",
            found.where,
        )


def _cudnn(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    if plan.device_kind.value not in _CUDA:
        return
    switches = [e for e in habits.of(Habit.CUDNN) if e not in habits.open]
    if found := _with(switches, "cudnn.enabled = False"):
        yield Finding(
            "script-cudnn",
            "warning",
            "cuDNN is turned off",
            "convolutions and recurrent layers run on torch's own kernels",
            "remove the line",
            found.where,
        )
    # Source: https://docs.pytorch.org/docs/2.13/notes/randomness.html
    found = habits.sure(Habit.DETERMINISTIC) or _with(switches, "cudnn.deterministic = True")
    if found:
        yield Finding(
            "script-deterministic",
            "hint",
            f"{found.what} asks for deterministic algorithms",
            "they are often slower than the others",
            "remove it unless runs must be reproducible bit by bit",
            found.where,
        )


def _with(places: list[Evidence], what: str) -> Evidence | None:
    return next((e for e in places if e.what == what), None)


def _syncs(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    # Source: https://docs.pytorch.org/docs/2.13/notes/cuda.html#asynchronous-execution
    found, kind = habits.of(Habit.SYNC), plan.device_kind.value
    if found and kind != "cpu":
        noun = VENDORS[kind].noun
        yield Finding(
            "script-sync",
            "hint",
            f"{found[0].what} in every training step{_more(found)}",
            f"on a tensor of the {noun} it waits for all queued work, and the {noun} then idles",
            "keep loss.detach(), and read it once in many steps",
            found[0].where,
        )


def _workers(habits: Habits, plan: LaunchPlan, machine: Machine) -> Iterator[Finding]:
    # Source: https://docs.pytorch.org/docs/2.13/data.html#single-process-data-loading
    found = habits.of(Habit.NO_WORKERS)
    cores = machine.cpu.cores // plan.processes.value.nproc_per_node
    if found and plan.device_kind.value != "cpu" and cores > 1:
        noun = VENDORS[plan.device_kind.value].noun
        yield Finding(
            "script-workers",
            "hint",
            f"a DataLoader without workers{_more(found)}",
            f"the {noun} waits while the training process reads the next batch",
            f"if reading takes time, set num_workers, up to the {cores} cores of a process",
            found[0].where,
        )


def _pinning(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    # Source: https://docs.pytorch.org/docs/2.13/data.html#memory-pinning
    found = habits.of(Habit.NO_PINNING)
    if found and plan.device_kind.value in _CUDA:
        yield Finding(
            "script-pinning",
            "hint",
            f"a DataLoader without pin_memory{_more(found)}",
            "copies to the GPU are slower from memory that is not pinned, and can't overlap",
            "set pin_memory=True, and use .to(device, non_blocking=True)",
            found[0].where,
        )


def _more(found: tuple[Evidence, ...]) -> str:
    return f", here and in {counted(len(found) - 1, 'other place')}" if len(found) > 1 else ""


_JUDGES: tuple[Judge, ...] = (
    *(
        _bound_to_cuda,
        _absent_device,
        _visible,
        _data_parallel,
        _sync_bn,
        _sync_bn_compiled,
        _anomaly,
        _cudnn,
    ),
    *(_syncs, _workers, _pinning),
)
