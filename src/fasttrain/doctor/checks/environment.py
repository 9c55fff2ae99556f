"""Checks of the environment that a run would start in."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.doctor.checks.words import check, is_on, most_visible, present, visible
from fasttrain.model.examination import Examination, Finding
from fasttrain.model.places import RUN_MARK
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.describe import and_join, counted

# Source: torch 2.13.0, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp; pytorch#114077, in 2.2.
_RENAMED_SINCE = (2, 2)
_RENAMED = (
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING",
)

ONE_OF_SEVERAL = (
    "a script started here takes itself for one rank of several, and waits for the others"
)
_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MEETING_NAMES = ("MASTER_ADDR", "MASTER_PORT")


@check("thread-count", "more threads for OpenMP and MKL than there are cores")
def _threads(seen: Examination) -> Iterator[Finding]:
    cores = seen.machine.cpu.cores
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        # OpenMP takes a list, one number for each level of nesting.
        first = seen.environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > cores:
            yield _threads.finding(
                "warning",
                f"{name} is {first}, with {counted(cores, 'core')} granted",
                why=f"the threads of a process stall each other; {seen.machine.cpu.cores_reason}",
                fix=f"unset {name}, and fasttrain run shares the cores out",
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
            why="each rank counts the cores from the first, so all of them bind to the same ones",
            fix=f"unset {' '.join(found)}",
        )


@check("blocking-launches", "whether every kernel is waited for")
def _blocking(seen: Examination) -> Iterator[Finding]:
    for kind in present(seen):
        variable = (VENDORS[kind].blocking or ("",))[0]
        if variable and is_on(seen, variable):
            yield _blocking.finding(
                "warning",
                f"{variable}={seen.environ[variable]} is left set",
                why="the host waits for every kernel, which is for finding errors and slow",
                fix=f"unset {variable}; fasttrain run --debug sets it for one run",
            )


@check("memory-caching", "whether torch keeps device memory for reuse")
def _caching(seen: Examination) -> Iterator[Finding]:
    # torch asks whether it is there at all, so that 0 counts too.
    # Source: torch 2.0, c10/cuda/CUDACachingAllocator.cpp, forceUncachedAllocator.
    name = "PYTORCH_NO_CUDA_MEMORY_CACHING"
    if name in seen.environ and visible(seen, "cuda"):
        yield _caching.finding(
            "warning",
            f"{name} is set",
            why="torch then asks the driver for every tensor's memory, which is many times slower",
            fix=f"unset {name}",
        )


@check("allocator-settings", "whether two variables set torch's allocator differently")
def _allocator(seen: Examination) -> Iterator[Finding]:
    # Source: torch 2.13.0, c10/cuda/CUDAAllocatorConfig.h: PYTORCH_ALLOC_CONF is read only where
    # the other one is not set; c10/core/AllocatorConfig.cpp had the reverse order in between.
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    both = old in seen.environ and new in seen.environ
    if both and seen.environ[old] != seen.environ[new] and visible(seen, "cuda"):
        yield _allocator.finding(
            "warning",
            f"{old} and {new} are both set, and differ",
            why="torch's allocator reads one of them alone; which one depends on torch's version",
            fix=f"unset the one that is not meant: {old} is the older name",
        )


@check("renamed-variables", "variables of torch under names that it gave up")
def _renamed(seen: Examination) -> Iterator[Finding]:
    found = [name for name in _RENAMED if name in seen.environ]
    if found and seen.machine.torch.release >= _RENAMED_SINCE:
        yield _renamed.finding(
            "hint",
            f"{and_join(found)} {'is an old name' if len(found) == 1 else 'are old names'}",
            why="torch warns of it in every rank, and the new name wins where both are set",
            fix=f"write {and_join(f'TORCH_{name}' for name in found)}",
        )


@check("stray-ranks", "whether the shell makes every script one rank of several")
def _ranks(seen: Examination) -> Iterator[Finding]:
    names = [name for name in (*_RANK_NAMES, *_MEETING_NAMES) if name in seen.environ]
    # Where torchrun or fasttrain itself set them, they belong there.
    launched = {"TORCHELASTIC_RUN_ID", RUN_MARK} & set(seen.environ)
    if not names or launched:
        return
    ranks = any(name in _RANK_NAMES for name in names)
    yield _ranks.finding(
        "warning" if ranks else "hint",
        f"{and_join(f'{name}={seen.environ[name]}' for name in names)} in this shell",
        why=ONE_OF_SEVERAL
        if ranks
        else "a script that makes a process group by itself goes there for it",
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


@check("nccl-switches", "ways between GPUs that NCCL is told not to take")
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
                why=f"gradients can't go by {way}, and take a slower way",
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
            why="the ranks compare notes before each collective, which is slow",
            fix="unset TORCH_DISTRIBUTED_DEBUG; fasttrain run --debug sets it for one run",
        )


CHECKS = (
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
