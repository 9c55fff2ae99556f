"""Checks of the environment that a run would start in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from fasttrain.doctor.check import check, is_on, most_visible, present, visible
from fasttrain.model.machine import Examination, Finding
from fasttrain.model.places import RUN_MARK
from fasttrain.model.vendors import VENDORS, DeviceKind
from fasttrain.planning.describe import and_join, counted, kind_noun
from fasttrain.planning.visible import visible_slots

# Source: torch 2.13.0, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp; pytorch#114077, in 2.2.
_RENAMED_SINCE = (2, 2)
_RENAMED = (
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING",
)

ONE_OF_SEVERAL = (
    "a script started here takes itself for one rank of several, and waits for the rest"
)
_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MEETING_NAMES = ("MASTER_ADDR", "MASTER_PORT")


@check("thread-count", "whether OpenMP and MKL use more threads than cores")
def _threads(seen: Examination) -> Iterator[Finding]:
    cores = seen.machine.cpu.cores
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        # OpenMP allows a list with one number for each level of nesting.
        first = seen.environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > cores:
            yield _threads.finding(
                "warning",
                f"{name} is {first}, with {counted(cores, 'core')} granted",
                why=f"the threads of a process compete for cores; {seen.machine.cpu.cores_reason}",
                fix=f"unset {name}; fasttrain run divides the cores among its processes",
            )


@check("thread-binding", "whether every rank binds its threads to the same cores")
def _binding(seen: Examination) -> Iterator[Finding]:
    off = {"", "false", "none", "disabled"}
    names = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
    found = [name for name in names if seen.environ.get(name, "").strip().lower() not in off]
    devices = most_visible(seen)
    if found and devices > 1:
        yield _binding.finding(
            "warning",
            f"{and_join(f'{name}={seen.environ[name]}' for name in found)} with {devices} devices",
            why="each rank counts cores from the first, so all ranks bind to the same ones",
            fix=f"unset {' '.join(found)}",
        )


@check("blocking-launches", "whether the host waits for every kernel")
def _blocking(seen: Examination) -> Iterator[Finding]:
    for kind in present(seen):
        variable = (VENDORS[kind].blocking or ("",))[0]
        if variable and is_on(seen, variable):
            yield _blocking.finding(
                "warning",
                f"{variable}={seen.environ[variable]} is left set",
                why="the host waits for every kernel, which is slow and meant for debugging",
                fix=f"unset {variable}; fasttrain run --debug sets it for one run",
            )


@check("memory-caching", "whether torch keeps device memory for reuse")
def _caching(seen: Examination) -> Iterator[Finding]:
    # torch only checks that the variable exists, so 0 turns caching off as well.
    # Source: torch 2.0, c10/cuda/CUDACachingAllocator.cpp, forceUncachedAllocator.
    name = "PYTORCH_NO_CUDA_MEMORY_CACHING"
    if name in seen.environ and visible(seen, "cuda"):
        yield _caching.finding(
            "warning",
            f"{name} is set",
            why="torch gets every tensor's memory from the driver, which is many times slower",
            fix=f"unset {name}",
        )


@check("allocator-settings", "whether two variables set torch's allocator differently")
def _allocator(seen: Examination) -> Iterator[Finding]:
    # Source: torch 2.13.0, c10/cuda/CUDAAllocatorConfig.h: PYTORCH_ALLOC_CONF is read only if
    # the other one is not set; for a while, c10/core/AllocatorConfig.cpp had the reverse order.
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    both = old in seen.environ and new in seen.environ
    if both and seen.environ[old] != seen.environ[new] and visible(seen, "cuda"):
        yield _allocator.finding(
            "warning",
            f"{old} and {new} are both set, and differ",
            why="torch's allocator reads only one of them; which one depends on torch's version",
            fix=f"unset the one that you don't want: {old} is the older name",
        )


@check("renamed-variables", "torch's variables under names that were changed")
def _renamed(seen: Examination) -> Iterator[Finding]:
    found = [name for name in _RENAMED if name in seen.environ]
    if found and seen.machine.torch.release >= _RENAMED_SINCE:
        yield _renamed.finding(
            "hint",
            f"{and_join(found)} {'is an old name' if len(found) == 1 else 'are old names'}",
            why="torch warns in every rank, and uses the new name if both are set",
            fix=f"write {and_join(f'TORCH_{name}' for name in found)}",
        )


@check("stray-ranks", "whether this shell sets the variables of a rank")
def _ranks(seen: Examination) -> Iterator[Finding]:
    names = [name for name in (*_RANK_NAMES, *_MEETING_NAMES) if name in seen.environ]
    # Inside of a run, torchrun or fasttrain has set them, as it should.
    launched = {"TORCHELASTIC_RUN_ID", RUN_MARK} & set(seen.environ)
    if not names or launched:
        return
    ranks = any(name in _RANK_NAMES for name in names)
    yield _ranks.finding(
        "warning" if ranks else "hint",
        f"{and_join(f'{name}={seen.environ[name]}' for name in names)} in this shell",
        why=ONE_OF_SEVERAL
        if ranks
        else "a script that creates a process group connects to this address",
        fix=f"unset {' '.join(names)}",
    )


@check("compile-disabled", "whether torch.compile is switched off")
def _compile(seen: Examination) -> Iterator[Finding]:
    # Source: torch 2.13.0, torch/_dynamo/config.py and eval_frame.py: only "1" counts.
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if seen.environ.get(name) == "1":
            yield _compile.finding(
                "warning",
                f"{name}=1 is left set",
                why="torch.compile does nothing, and neither does --compile",
                fix=f"unset {name}",
            )


@check("nccl-switches", "transports between GPUs that are disabled for NCCL")
def _nccl(seen: Examination) -> Iterator[Finding]:
    if len(visible(seen, "cuda")) < 2:
        return
    for name, way in (
        ("NCCL_P2P_DISABLE", "NVLink and PCIe from GPU to GPU"),
        ("NCCL_SHM_DISABLE", "shared memory"),
        ("NCCL_IB_DISABLE", "InfiniBand and RoCE"),
    ):
        if is_on(seen, name):
            yield _nccl.finding(
                "hint" if name == "NCCL_IB_DISABLE" else "warning",
                f"{name}={seen.environ[name]} is left set",
                why=f"gradients can't use {way}, and take a slower path",
                fix=f"unset {name}, unless runs hang without it",
            )


@check("distributed-debug", "whether torch.distributed checks every collective")
def _debug(seen: Examination) -> Iterator[Finding]:
    # Source: torch 2.13 documentation, torch.distributed, "Debugging": DETAIL "may impact the
    # application performance".
    if seen.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield _debug.finding(
            "hint",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL is left set",
            why="the ranks compare their calls before each collective, which is slow",
            fix="unset TORCH_DISTRIBUTED_DEBUG; fasttrain run --debug sets it for one run",
        )


_VARIABLES = (
    _threads,
    _binding,
    _blocking,
    _caching,
    _allocator,
    _renamed,
    _ranks,
    _compile,
    _nccl,
    _debug,
)


# Checks of the variables that choose devices, such as CUDA_VISIBLE_DEVICES.


# Values that hide every device on purpose: CUDA stops at the first word that names no device.
_NOTHING = frozenset({"", "-1", "NoDevFiles", "none"})


def _lists(seen: Examination) -> Iterator[tuple[DeviceKind, str, list[str]]]:
    """Yield each kind of device whose variable is set, with the variable and its words."""
    for kind in present(seen):
        variable = VENDORS[kind].visibility
        if variable in seen.environ:
            words = [word.strip() for word in seen.environ[variable].split(",")]
            yield kind, variable, words


def _named_twice(words: list[str]) -> list[str]:
    return sorted({word for word in words if words.count(word) > 1})


def _malformed(kind: DeviceKind, value: str) -> bool:
    """True if Ascend's runtime would read fewer devices than a list names, or none."""
    if not VENDORS[kind].ascending or not value:
        return False
    if not re.fullmatch(r"\d+(,\d+)*", value):
        return True
    numbers = [int(word) for word in value.split(",")]
    return any(first >= second for first, second in pairwise(numbers))


@check("visible-ascending", "whether ASCEND_RT_VISIBLE_DEVICES is in ascending order")
def _ascending(seen: Examination) -> Iterator[Finding]:
    for kind, variable, words in _lists(seen):
        value = seen.environ[variable]
        if not _malformed(kind, value):
            continue
        numbers = sorted({int(word) for word in words if word.isdecimal()})
        fixed = ",".join(map(str, numbers)) or "0"
        yield _ascending.finding(
            "error",
            f"{variable}={value} is not a list of ascending numbers",
            # Source: CANN 8.5 and 9.1, "ASCEND_RT_VISIBLE_DEVICES": ascending order only; any other
            # character, a space too, ends the list. torch_npu 2.13.0 counts 0 for "1,0".
            why="torch_npu then sees fewer NPUs than it names, or none",
            fix=f"export {variable}={fixed}",
        )


@check("visible-repeated", "whether a device is listed twice")
def _repeated(seen: Examination) -> Iterator[Finding]:
    for kind, variable, words in _lists(seen):
        twice = _named_twice(words)
        if not twice or VENDORS[kind].ascending:
            continue
        once = ",".join(dict.fromkeys(words))
        yield _repeated.finding(
            "error",
            f"{variable}={','.join(words)} names {', '.join(twice)} twice",
            why="CUDA and torch treat such a list as empty",
            fix=f"export {variable}={once}",
        )


@check("visible-unknown", "whether every listed device exists")
def _unknown(seen: Examination) -> Iterator[Finding]:
    for kind, variable, words in _lists(seen):
        ignored = _named_twice(words) or _malformed(kind, seen.environ[variable])
        slots = visible_slots(seen.machine, kind, seen.environ)
        if ignored or len(slots) == len(words) or words[0] in _NOTHING:
            continue
        known = ",".join(words[: len(slots)])
        there = sum(device.kind == kind for device in seen.machine.devices)
        yield _unknown.finding(
            "warning" if slots else "error",
            f"{variable} names {words[len(slots)]}, which does not exist",
            why=f"the list ends there, so {len(slots)} of {kind_noun(kind, there)} can be used",
            fix=f"export {variable}={known}" if known else f"unset {variable}",
        )


@check("visible-hidden", "whether devices are hidden from a run")
def _hidden(seen: Examination) -> Iterator[Finding]:
    for kind, variable, words in _lists(seen):
        there = sum(device.kind == kind for device in seen.machine.devices)
        slots = visible_slots(seen.machine, kind, seen.environ)
        everything = words[0] in _NOTHING
        # SLURM sets the variable for its jobs, and a process can use one MIG instance only. Words
        # that name no device are findings of other checks.
        meant = seen.cluster.job or any(device.parent_uuid for device in seen.machine.devices)
        broken = _malformed(kind, seen.environ[variable])
        some = len(slots) == len(words) < there and not meant and not broken
        if everything or some:
            hidden = there - len(slots)
            yield _hidden.finding(
                "warning" if everything else "hint",
                f"{variable}={','.join(words)} hides {hidden} of {kind_noun(kind, there)}",
                why="a run trains on the CPU" if everything else "a run can't use them",
                fix=f"unset {variable}",
            )


_VISIBILITY = (_ascending, _repeated, _unknown, _hidden)

CHECKS = (*_VISIBILITY, *_VARIABLES)
