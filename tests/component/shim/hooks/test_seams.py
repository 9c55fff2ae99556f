"""All that replaces attributes of torch and Python: in whatever order it comes, and goes again."""

from __future__ import annotations

import builtins
import bz2
import datetime as dt
import io
import os
import random
import shutil
import socket
import sqlite3
import sqlite3.dbapi2
import subprocess
import tarfile
import tempfile
import time
import timeit
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from enum import EnumType
from itertools import combinations, permutations, product
from multiprocessing import shared_memory, spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, serialization
from torch import distributed as dist
from torch.amp import GradScaler, autocast
from torch.nn import Module, functional
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import checkpoint
from torch.utils.data import DataLoader, dataloader
from torch.utils.hooks import BackwardHook, RemovableHandle

from fasttrain.model.attempts import Preempt
from fasttrain.model.decision import Decision, Source, SourceKind
from fasttrain.model.levers import Amp, Strategy
from fasttrain.model.outcome import State
from fasttrain.model.plan import Processes
from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.lever import SideEffects
from fasttrain.shim.data_parallel.context import LeverState, ParallelContext
from fasttrain.shim.data_parallel.loading.lever import SharedLoaders
from fasttrain.shim.data_parallel.per_rank import DataLoaderLever
from fasttrain.shim.data_parallel.random_streams import RandomStreams
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.replicate import Replicate
from fasttrain.shim.data_parallel.split.surroundings import SideEffectWatch
from fasttrain.shim.hooks import patching, seams
from fasttrain.shim.hooks.dynamo import UserCompile
from fasttrain.shim.hooks.loop import TrainingState
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.levers.amp.lever import AmpLever
from fasttrain.shim.levers.compile.by_outputs import take_by_outputs
from fasttrain.shim.levers.compile.graphs import watch_gradients
from fasttrain.shim.levers.compile.slots import watch_hooks
from fasttrain.shim.levers.loss_scaling.lever import LossScaling
from fasttrain.shim.levers.matmul import MatmulLever
from fasttrain.shim.levers.npu_optimizer.lever import NpuOptimizerLever
from fasttrain.shim.levers.optimizer import OptimizerLever
from fasttrain.shim.multiprocessing_hooks import follow_started
from fasttrain.shim.runtime import Runtime, hide_own_frames, name_users_lines
from fasttrain.shim.snapshots.replay import Replay
from fasttrain.shim.snapshots.writer import LoopState
from fasttrain.shim.watch.save_guard import SaveGuard
from support.forked_ranks import on_ranks

ABSENT = object()
# Whose attributes are replaced.
OWNERS: tuple[Any, ...] = (
    Tensor, Module, Optimizer, SGD, Adam, AdamW, Adadelta, RMSprop, LRScheduler, GradScaler,
    autocast, BackwardHook, RemovableHandle, DataLoader, dataloader._BaseDataLoaderIter,
    dataloader._MultiProcessingDataLoaderIter, dataloader._SingleProcessDataLoaderIter, _BatchNorm,
    torch, torch.autograd, torch.autograd.graph, torch.autograd.Function,
    torch.autograd.function.BackwardCFunction, torch.jit, torch.jit.RecursiveScriptModule,
    torch.sparse, torch.special, torch._C._nn, torch.random, torch.cuda, torch.xpu, torch.Generator,
    type(torch.backends), type(torch.backends.cuda.matmul), functional, modules, checkpoint,
    serialization, nn.utils, nn.utils.clip_grad, dist, dist.distributed_c10d, dist.Work,
    builtins, io, os, shutil, socket, socket.socket, subprocess, tempfile, time, timeit, uuid,
    random, random.Random, dt.datetime, warnings, spawn, bz2, tarfile, sqlite3, sqlite3.dbapi2,
    shared_memory.SharedMemory,
)  # fmt: skip
Install = Callable[[ExitStack], object]


def attributes() -> dict[tuple[int, str], Any]:
    """Return the functions and descriptors that are there to be replaced."""
    return {
        (at, name): value
        for at, owner in enumerate(OWNERS)
        for name, value in vars(owner).items()
        if callable(value) or hasattr(type(value), "__get__")
    }


def changed(before: dict[tuple[int, str], Any]) -> list[str]:
    """Return the attributes that are another object than they were."""
    now = attributes()
    return [
        f"{OWNERS[at]}.{name}"
        for at, name in before.keys() | now.keys()
        if before.get((at, name), ABSENT) is not now.get((at, name), ABSENT)
    ]


def out_of_order() -> list[str]:
    """Return the attributes that are patched, and not as their seam declares."""
    found = []
    for (_, name), patches in patching._PATCHES.items():
        places = [layer.place for layer in patches[-1].layers]
        if len(patches) > 1 or places != sorted(places) or not patches[-1].is_outermost():
            found.append(name)
    return found


def recorder(name: str) -> OutcomeRecorder:
    return OutcomeRecorder(name, "a test", explicit=False)


def decide(value: Any) -> Decision[Any]:
    return Decision(value, "a test wants it", Source(SourceKind.FLAG, "--flag"))


def parts(folder: Path) -> dict[str, Install]:
    """Return everything that patches, but what has to meet other ranks."""
    roots, user_compile = RootCalls(), UserCompile()
    nobody = SimpleNamespace(install=lambda _: None)
    ranks: Any = SimpleNamespace(
        rank=1, world_size=2, store=None, waits=nullcontext, joined=True, on_join=[], boardless=True
    )
    streams = RandomStreams(ranks)
    training = TrainingState(roots)
    strategy = Strategy("fsdp", collectives="nccl")
    context = ParallelContext(strategy, ranks, roots, streams, training, user_compile)
    replicate = Replicate(recorder("strategy"), context)
    replicate._consistency = nobody  # type: ignore[assignment]
    answers = Answers(ranks)
    amp = decide(Amp("float16", "cpu"))
    loop = LoopState(0, roots, LeverState())
    replay = Replay(roots, loop.registry, loop.hooks, loop.outputs, loop.files_left)

    def replayed(undo: ExitStack) -> None:
        replay.install(undo)
        replay.begin(undo)
        loop.checkpoints.look_out(0.0, undo)

    def trial(undo: ExitStack) -> None:
        undo.enter_context(SideEffectWatch())  # type: ignore[func-returns-value]

    def snapshots(undo: ExitStack) -> None:
        loop.epochs.prepare(undo)
        loop.install(undo)

    return {
        "training state": training.install,
        "replicate": replicate.install,
        "side effects": SideEffects(recorder("side_effects"), ranks, answers, folder).install,
        "per rank": DataLoaderLever(recorder("dataloader"), context).install,
        "loading": SharedLoaders(recorder("loading"), ranks, answers).install,
        "amp": AmpLever(amp, recorder("amp"), roots).install,
        "loss scaling": LossScaling(amp, recorder("loss_scaling"), roots).install,
        "compile": lambda undo: watch_hooks(lambda *_: None, undo),
        "by outputs": take_by_outputs,
        "CUDA graphs": lambda undo: watch_gradients(bool, bool, undo),
        "npu": NpuOptimizerLever(recorder("optimizer")).install,
        "optimizer": OptimizerLever(recorder("optimizer")).install,
        "matmul": MatmulLever(decide("keep"), recorder("matmul"), roots).install,
        "snapshots": snapshots,
        "replay": replayed,
        "trial": trial,
        "roots": roots.install,
        "steps": StepMeter(0.0).install,
        "user's compile": user_compile.install,
        "warnings": name_users_lines,
        "stacks": hide_own_frames,
        "saves": SaveGuard().install,
        "spawned": lambda undo: follow_started(folder / "plan.json", 0, undo),
    }


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")  # as side effects set it


@pytest.fixture
def together() -> Iterator[ExitStack]:
    with ExitStack() as undo:
        yield undo


@pytest.mark.usefixtures("environment")
def test_any_two_come_and_go_in_any_order(tmp_path: Path) -> None:
    before, every = attributes(), parts(tmp_path)
    for pair in combinations(every, 2):
        for coming, going in product(permutations(pair), permutations(pair)):
            with ExitStack() as whole:
                undo = {name: whole.enter_context(ExitStack()) for name in pair}
                for name in coming:
                    every[name](undo[name])
                assert not out_of_order(), coming
                for name in going:
                    undo[name].close()
        assert not changed(before), pair
    assert not patching._PATCHES


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("seed", range(3))
def test_all_together_in_some_order(tmp_path: Path, together: ExitStack, seed: int) -> None:
    before, every = attributes(), parts(tmp_path)
    coming, going = list(every), list(every)
    random.Random(seed).shuffle(coming)
    random.Random(-seed).shuffle(going)
    undo = {name: together.enter_context(ExitStack()) for name in every}
    for name in coming:
        every[name](undo[name])
    shared = [p[0] for p in patching._PATCHES.values() if len(p[0].layers) > 1]
    assert not out_of_order()
    assert {patch.home for patch in shared} == {  # and no module alone has put two there
        name for name, seam in vars(seams).items() if isinstance(seam, EnumType) and len(seam)
    }
    for name in going:
        undo[name].close()
        assert not out_of_order(), name
    assert not changed(before)
    assert not patching._PATCHES


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        (Strategy("ddp", collectives="gloo"), "fused"),
        (Strategy("ddp", "per-rank", collectives="gloo"), "npu"),
        (Strategy("fsdp", collectives="gloo"), "npu"),
    ],
    ids=["ddp", "per-rank", "fsdp"],
)
def test_no_two_modules_replace_one_attribute(
    tmp_path: Path, plan: Any, strategy: Strategy, optimizer: str
) -> None:
    """With every lever that there is: one that finds an attribute taken has failed."""
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run/train.py").touch()
    choices = {
        "amp": "float16",
        "compile": "default",
        "matmul": "high",
        "hang": True,
        "nan": "warn",
    }
    wanted = plan(tmp_path / "run", optimizer=optimizer, **choices)
    wanted = replace(
        wanted,
        processes=decide(Processes("torchrun", nproc_per_node=2)),
        levers=replace(wanted.levers, strategy=decide(strategy)),
        preempt=decide(Preempt("snapshot")),
    )

    def act(ranks: Ranks) -> Any:
        before = attributes()
        os.environ["WORLD_SIZE"] = str(ranks.world_size)
        Ranks.at_store = lambda *_, **__: ranks  # type: ignore[method-assign]
        ranks.join = lambda: None  # type: ignore[method-assign]
        runtime = Runtime(wanted, ranks.rank, time.perf_counter())
        runtime.install()
        watch_hooks(lambda *_: None, runtime._undo)  # as compile does at the first root
        with SideEffectWatch():
            homes = {
                f"{patch._owner}.{name}": patch.home
                for (_, name), patches in patching._PATCHES.items()
                for patch in patches
            }
        failed = [o.reason for o in runtime.outcomes().values() if o.state is State.FAILED]
        runtime.close()
        return failed, homes, changed(before)

    for end in on_ranks(tmp_path / "ranks", act, wait_s=120.0):
        failed, homes, left = end.good
        assert failed == []
        assert left == []
        assert len(homes) > 150
