"""Habits of a script that cost speed, or fail, whatever fasttrain does.

Only what the source shows beyond a condition, and each habit once, at its first place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fasttrain.model.examination import Finding
from fasttrain.model.machine import Machine
from fasttrain.model.plan import Evidence, LaunchPlan
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.describe import counted
from fasttrain.source.habits import Habit, Habits

# ROCm answers to CUDA's names.
_CUDA = tuple(kind for kind, vendor in VENDORS.items() if vendor.torch_type == "cuda")

Judge = Callable[[Habits, LaunchPlan, Machine], Iterator[Finding]]


def judge_habits(habits: Habits, plan: LaunchPlan, machine: Machine) -> Iterator[Finding]:
    """Yield what the script's author could change, the gravest first within each topic."""
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
    """Return the devices that a process can name; the launcher gives ranks of its own one each."""
    strategy = plan.levers.strategy.value
    alone = strategy.injected and bool(strategy.visibility)
    return 1 if alone else len(plan.devices.value)


def _number(what: str) -> int:
    number = what.partition(":")[2]
    return int(number) if number.isdecimal() else 0


def _visible(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    found = habits.sure(Habit.VISIBLE)
    if not found or VENDORS[plan.device_kind.value].visibility != "CUDA_VISIBLE_DEVICES":
        return
    several = plan.processes.value.nproc_per_node > 1
    if several or plan.devices.source.explicit:
        yield Finding(
            "script-visible",
            "warning",
            f"the script sets {found.what} itself",
            f"all {plan.processes.value.nproc_per_node} processes would share those GPUs"
            if several
            else f"that takes the place of {plan.devices.source}",
            "leave the line out, and choose GPUs with --gpus",
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
            "leave it out, and start one process for each GPU with --gpus all",
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
            "leave it out; under several ranks fasttrain takes BatchNorm's statistics over the"
            " whole batch anyway, for a script that knows nothing of ranks",
            found.where,
        )


def _sync_bn_compiled(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    # Source: https://github.com/pytorch/pytorch/issues/161302
    levers, found = plan.levers, habits.sure(Habit.SYNC_BN)
    compiles = levers.compile.value.mode != "off" or habits.sure(Habit.COMPILE)
    if not found or not compiles or plan.processes.value.world_size == 1:
        return
    # Where the shim makes the script data-parallel, leaving it out would change nothing.
    if plan.device_kind.value != "cpu" and not levers.strategy.value.injected:
        yield Finding(
            "script-sync-bn",
            "hint",
            "SyncBatchNorm breaks the compiled graph at each BatchNorm",
            "torch.compile does not take in what the ranks tell each other there, and compiles"
            " each part between two of them by itself",
            "leave SyncBatchNorm out where a rank's part of a batch is large enough for its own"
            " statistics, or compare with --compile off",
            found.where,
        )


def _sharded(habits: Habits, plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    if plan.levers.strategy.value.mode != "fsdp":
        return
    if found := habits.sure(Habit.WHOLE_MODEL):
        yield Finding(
            "script-sharded",
            "warning",
            f"torch.save({found.what}) pickles the model, which --strategy fsdp shards in place",
            "only what state_dict() gives is put together from all ranks",
            f"save {found.what}.state_dict()",
            found.where,
        )
    # Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py of torch 2.13.
    if found := habits.sure(Habit.DEEPCOPY):
        yield Finding(
            "script-sharded",
            "warning",
            f"copy.deepcopy({found.what}) fails once --strategy fsdp has sharded the model",
            "torch raises: FSDP does not support deepcopy",
            "use --strategy ddp",
            found.where,
        )


def _anomaly(habits: Habits, _plan: LaunchPlan, _machine: Machine) -> Iterator[Finding]:
    # Source: torch/autograd/anomaly_mode.py of torch 2.13.
    if found := habits.sure(Habit.ANOMALY):
        yield Finding(
            "script-anomaly",
            "warning",
            "anomaly detection is on",
            "its tests slow training down; torch means it for debugging",
            f"leave {found.what} out",
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
            "leave the line out",
            found.where,
        )
    # Source: https://docs.pytorch.org/docs/2.13/notes/randomness.html
    found = habits.sure(Habit.DETERMINISTIC) or _with(switches, "cudnn.deterministic = True")
    if found:
        yield Finding(
            "script-deterministic",
            "hint",
            f"deterministic algorithms are asked for by {found.what}",
            "they are often slower than the others",
            "leave it out where runs needn't be repeated bit by bit",
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
            "keep loss.detach(), and read it every so many steps",
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
            f"where reading takes work, give it num_workers, up to the {cores} cores of a process",
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
            "give it pin_memory=True, and .to(device, non_blocking=True)",
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
        _sharded,
        _anomaly,
        _cudnn,
    ),
    *(_syncs, _workers, _pinning),
)
