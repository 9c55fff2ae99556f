"""The plans of the runs of a proof, and what can't be proved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import LEVERS
from fasttrain.model.plan import Evidence, LaunchPlan, ScriptFacts, Target
from fasttrain.model.proof import Proof
from fasttrain.planning.plan import make_plan
from fasttrain.planning.proof import (
    REORDERED,
    check,
    compared,
    one_process,
    plain_settings,
    plan_side,
    python_settings,
    rounding,
    without_levers,
)


def side_of(make: Any, machine: Any, side: Any, environ: Any = (), **options: Any) -> LaunchPlan:
    settings = make.settings(**options)
    if side != "chosen":
        settings = python_settings(settings)
    plan = make_plan(settings, machine, make.invocation())
    kind = plan.device_kind.value
    off = {name: row.off_value(kind, settings) for name, row in LEVERS.items()}
    return plan_side(plan, Proof(side, 150), off=off, environ=dict(environ))


@pytest.mark.parametrize("side", ["plain", "control-2"])
def test_plain_python_has_no_lever_whatever_was_asked_for(make: Any, side: Any) -> None:
    options = {"amp": "bf16", "compile": "max-autotune", "matmul": "high", "optimizer": "fused"}
    plan = side_of(make, make.gpus(1), side, **options)
    assert plan.levers.on() == {}
    assert plan.levers.matmul.value == "keep", "the script may have set it"
    assert make.variable(plan, "PYTHONHASHSEED").value == "0"
    assert make.variable(plan, "WANDB_MODE").value == "offline"


def test_the_chosen_run_has_the_levers_of_any_run(make: Any) -> None:
    plan = side_of(make, make.gpus(1), "chosen", compile="default", max_steps=50)
    assert plan.levers.on() == {
        "amp": "bfloat16",
        "compile": "default",
        "optimizer": "fused",
        "matmul": "high",
    }
    assert plan.max_steps is None, "who gives the turns counts"
    assert plan.guards.hang.value.action == "stop"


def test_plain_python_is_one_process_where_ranks_are_a_lever(make: Any) -> None:
    options = {"nproc_per_node": 2, "strategy": "fsdp", "show_ranks": "0,1", "batch": "split"}
    settings = make.settings(**options)
    check(make_plan(settings, make.gpus(2), make.invocation()))
    plain = make_plan(one_process(plain_settings(settings)), make.gpus(2), make.invocation())
    assert plain.processes.value.backend == "direct"
    assert plain.levers.strategy.value.mode == "none"


def test_ranks_of_the_scripts_own_stay_without_levers(make: Any) -> None:
    facts = ScriptFacts(handles_ranks=Evidence("init_process_group", "train.py:1"))
    plan = make_plan(
        make.settings(nproc_per_node=2), make.gpus(2), replace(make.invocation(), facts=facts)
    )
    assert "strategy" not in plan.levers.on(), "it is no lever that is compared"
    off = {name: row.off_value("cuda", make.settings()) for name, row in LEVERS.items()}
    plain = without_levers(plan, off)
    assert plain.levers.strategy.value.mode == "script"
    assert plain.levers.on() == {}


def test_a_seed_of_hashes_that_the_user_has_set_stays(make: Any) -> None:
    plan = side_of(make, make.machine(), "chosen", env=("PYTHONHASHSEED=7",))
    assert [v.value for v in plan.environment if v.name == "PYTHONHASHSEED"] == ["7"]
    plan = side_of(make, make.machine(), "chosen", {"PYTHONHASHSEED": "7"})
    assert not [v for v in plan.environment if v.name == "PYTHONHASHSEED"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"amp": "off", "matmul": "highest"}, REORDERED),
        ({"amp": "off", "matmul": "high"}, 2**-11),
        ({"amp": "fp16"}, 2**-11),
        ({"amp": "bf16"}, 2**-8),
        ({"amp": "off", "matmul": "highest", "compile": "max-autotune"}, REORDERED),
    ],
)
def test_controls_round_as_the_roughest_lever(
    make: Any, options: dict[str, Any], expected: float
) -> None:
    assert rounding(make.plan(make.gpus(1), **options)) == expected


def test_loader_workers_are_compared_with_none(make: Any) -> None:
    options = {"compile": "off", "optimizer": "keep", "loader_workers": 2}
    plan = make.plan(make.machine(), **options)
    check(plan)
    assert compared(plan) == {"loader workers": "2"}
    assert compared(make.plan(make.machine(), compile="default"))["compile"] == "default"
    assert python_settings(make.settings(**options)).loader_workers.value is None


@pytest.mark.parametrize(
    ("options", "target", "slug"),
    [
        ({"nproc_per_node": 2, "strategy": "none"}, None, "prove-ranks"),
        ({"nproc_per_node": 2, "batch": "per-rank"}, None, "prove-ranks"),
        ({"nproc_per_node": 2, "rdzv_endpoint": "localhost:1"}, None, "prove-ranks"),
        (
            {"nproc_per_node": 2, "nodes": "2", "node_rank": 0, "master_addr": "a"},
            None,
            "prove-ranks",
        ),
        ({"preempt": "snapshot"}, None, "prove-preempt"),
        ({"compile": "off", "optimizer": "keep"}, None, "prove-nothing"),
        ({}, Target("command", "train", ()), "prove-command"),
    ],
)
def test_what_can_not_be_proved(make: Any, options: Any, target: Any, slug: str) -> None:
    plan = make.plan(make.machine(), None, target, **options)
    with pytest.raises(FasttrainError) as caught:
        check(plan)
    assert caught.value.slug == slug
