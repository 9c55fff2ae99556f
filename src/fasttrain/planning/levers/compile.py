"""Decides torch.compile: its mode and scope."""

from __future__ import annotations

from fasttrain.model.decision import Decision
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.levers import Compile, CompileMode, CompileScope, Strategy
from fasttrain.model.machine import Machine
from fasttrain.model.vendors import VENDORS, DeviceKind
from fasttrain.planning.describe import EXACT, asked, is_exact, release, torch_phrase
from fasttrain.planning.levers.all import Situation

# CUDA graphs replay into the same memory: an output kept over the next call, or gradients that
# accumulate over several, are overwritten. The worker watches for both before it takes them.
_WITHOUT_GRAPHS: dict[CompileMode, CompileMode] = {
    "max-autotune": "max-autotune-no-cudagraphs",
    "reduce-overhead": "default",
}


def decide(situation: Situation) -> Decision[Compile]:
    """Return the mode that is right from the first step on, what may follow it, and the scope.

    Raises:
        FasttrainError: ``compile-torch``, ``compile-npu`` or ``compile-compiler`` when this machine
            can't compile.
    """
    setting, scope = situation.settings.compile, situation.settings.compile_scope.value
    mode, kind = setting.value, situation.chosen.kind
    strategy: Strategy = situation.decided["strategy"].value
    if mode == "off":
        return Decision(Compile("off", "off", scope), asked(setting), setting.source)
    if mode == "auto":
        return _left_to_the_worker(situation, kind)
    _check(situation.machine, kind)
    if mode not in _WITHOUT_GRAPHS:
        return Decision(Compile(mode, mode, scope), asked(setting), setting.source)
    used, graphs, reason = _graphs(mode, scope, kind)
    if graphs and strategy.injected:
        graphs = None
        reason = (
            f"{used} instead of {mode}, whose CUDA graphs don't go with"
            " DistributedDataParallel (pytorch#140395)"
        )
    compiled = Compile(mode, used, scope, graphs)
    return Decision(compiled, f"{asked(setting)}; {reason}", setting.source)


def _left_to_the_worker(situation: Situation, kind: DeviceKind) -> Decision[Compile]:
    """Return the decision that the worker decides, or off with the reason why it can't."""
    setting, scope = situation.settings.compile, situation.settings.compile_scope.value
    if reason := _why_not_auto(situation, kind):
        return Decision(Compile("off", "off", scope), f"auto: {reason}", setting.source)
    reason = f"{asked(setting)}; the run starts eagerly, and compiles when that pays"
    return Decision(Compile("auto", "default", scope), reason, setting.source)


def _why_not_auto(situation: Situation, kind: DeviceKind) -> str:
    settings = situation.settings
    if is_exact(settings):
        return EXACT
    if situation.processes.backend != "direct" and (why := _why_not_ranks(situation, kind)):
        return f"{why}: --compile default compiles at once"
    if settings.preempt.value == "snapshot" or settings.resume.value:
        return "a run with snapshots is compiled from its beginning on or not at all"
    try:
        _check(situation.machine, kind)
    except FasttrainError as error:
        return error.why
    return ""


def _why_not_ranks(situation: Situation, kind: DeviceKind) -> str:
    """Return why the ranks of a run can't switch together; empty if they can."""
    processes = situation.processes
    strategy: Strategy = situation.decided["strategy"].value
    if processes.backend != "torchrun":
        return "processes that SLURM starts aren't switched yet"
    if processes.max_nodes > 1:
        return "the ranks of several nodes can't switch together yet"
    if kind != "cpu":
        return f"several processes switch together on processors alone so far, and not on {kind}"
    if strategy.mode == "fsdp":
        return "ranks that share a model's parameters can't switch together yet"
    if strategy.mode == "none" and processes.world_size > 1:
        return "ranks that have nothing to do with each other can't switch together"
    return ""


def _graphs(
    mode: CompileMode, scope: CompileScope, kind: DeviceKind
) -> tuple[CompileMode, CompileMode | None, str]:
    """Return the mode to start in, the one with CUDA graphs that may follow, and why."""
    if other := VENDORS[kind].other_graphs:
        used = _WITHOUT_GRAPHS[mode]
        return used, None, f"{used} instead of {mode}, whose {other} nobody has tried in a loop yet"
    if not VENDORS[kind].cuda_graphs:
        return mode, None, f"CUDA graphs, which {mode} would use, don't exist on {kind}"
    used = _WITHOUT_GRAPHS[mode]
    if scope == "blocks":
        return used, None, (
            f"{used} instead of {mode}, whose CUDA graphs don't hold the outputs of one block"
            " while the next one runs (pytorch#158551)"
        )  # fmt: skip
    return used, mode, (
        f"{used} until the loop has shown that {mode}'s CUDA graphs are safe in it, with"
        " no gradient accumulation or repeated calls (pytorch#169545, #148439)"
    )  # fmt: skip


def _check(machine: Machine, kind: DeviceKind) -> None:
    vendor = VENDORS[kind]
    if machine.torch.release < vendor.compiles_since:
        raise FasttrainError(
            "--compile was asked for, but this torch can't compile",
            why=f"torch.compile needs {release(vendor.compiles_since)} on {kind}, and there is"
            f" {torch_phrase(machine)}",
            fix="upgrade torch, or use --compile off",
            slug="compile-torch",
        )
    if vendor.compiles_by and not machine.torch.triton_ascend:
        raise FasttrainError(
            f"--compile was asked for, but {vendor.compiles_by} is not installed",
            why=f"torch.compile writes the kernels of {vendor.noun}s by it",
            fix=f"pip install {vendor.compiles_by}, or use --compile off",
            slug="compile-npu",
            exit_code=ExitCode.UNAVAILABLE,
        )
    if not machine.cxx_compiler:
        raise FasttrainError(
            "--compile was asked for, but there is no C++ compiler",
            why="torch.compile builds its kernels with one",
            fix="apt-get install g++, or set CXX to a compiler, or use --compile off",
            slug="compile-compiler",
            exit_code=ExitCode.UNAVAILABLE,
        )
