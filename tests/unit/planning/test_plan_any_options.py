"""Whatever is asked of whatever machine: a sound plan, or an error that a user can act on."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.model.codec import dumps, loads
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.levers import (
    AmpChoice,
    CompileMode,
    CompileScope,
    MatmulChoice,
    OptimizerChoice,
    StrategyChoice,
)
from fasttrain.model.machine import Torch
from fasttrain.model.plan import LaunchPlan, Target, TargetKind
from fasttrain.model.settings import RestartOn
from fasttrain.model.vendors import DeviceChoice
from fasttrain.planning.explain import decisions, mask_plan, shell_script


def _one_of(choice):
    return st.sampled_from(get_args(choice))


_COUNTS = st.integers(1, 5)
_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.sampled_from(["0", "0,1", "1,0", "all", "auto:1", "auto:9", "GPU-1", "x"]),
        "device": _one_of(DeviceChoice),
        "amp": _one_of(AmpChoice),
        "compile": _one_of(CompileMode),
        "compile_scope": _one_of(CompileScope),
        "optimizer": _one_of(OptimizerChoice),
        "matmul": _one_of(MatmulChoice),
        "strategy": _one_of(StrategyChoice),
        "nproc_per_node": _COUNTS,
        "nodes": st.sampled_from(["1", "2", "1:3", "", "0"]),
        "node_rank": st.integers(0, 2),
        "master_addr": st.sampled_from(["head", "::1", ""]),
        "master_port": _COUNTS,
        "rdzv_endpoint": st.sampled_from(["head:1", "head"]),
        "max_restarts": st.integers(0, 1),
        "restart_on": _one_of(RestartOn),
        "show_ranks": st.sampled_from(["0", "1", "all", "0,9"]),
        "debug": st.booleans(),
        "env": st.lists(st.sampled_from(["A=1", "HF_TOKEN=x", "OMP_NUM_THREADS=3", "B"])).map(
            tuple
        ),
    },
)
_ENVIRON = st.dictionaries(
    st.sampled_from(["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_TOKEN"]),
    st.sampled_from(["0", "1,0", "", "-1", "0,0", "GPU-1"]),
)
_TARGET = st.builds(
    Target,
    _one_of(TargetKind),
    st.just("t.py"),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=3).map(tuple),
)


@st.composite
def _machines(draw, make):
    like = draw(st.sampled_from([None, make.h100, make.t4, make.npu, make.rocm]))
    machine = make.gpus(draw(st.integers(1, 3)), like) if like else make.machine()
    version = draw(st.sampled_from(["", "1.13.1", "2.0.0", "2.13.0+cpu"]))
    build = draw(st.sampled_from([machine.torch.build, "cpu"]))
    return replace(
        machine, torch=Torch(version, build), cxx_compiler=draw(st.sampled_from(["", "g++"]))
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data(), options=_OPTIONS, environ=_ENVIRON, target=_TARGET)
def test_a_sound_plan_or_a_fasttrain_error(make, data, options, environ, target):
    machine = data.draw(_machines(make))
    try:
        plan = make.plan(machine, environ, target, **options)
    except FasttrainError as error:
        refused: FasttrainError | None = error
    else:
        refused = None
    if refused is not None:
        assert refused.exit_code in (ExitCode.USAGE, ExitCode.UNAVAILABLE, ExitCode.CONTRADICTION)
        assert all((refused.what, refused.why, refused.fix))
        return
    processes, names = plan.processes.value, [variable.name for variable in plan.environment]
    assert loads(LaunchPlan, dumps(plan)) == plan
    assert len(names) == len(set(names))
    assert plan.argv[len(plan.argv) - len(target.args) :] == target.args
    assert processes.backend == "torchrun" or processes.world_size == 1
    assert "HF_TOKEN" not in names or "x" not in [v.value for v in mask_plan(plan).environment]
    assert all(row.reason and row.source for row in decisions(plan))
    assert shell_script(plan, environ).startswith("#!/bin/sh\n")
