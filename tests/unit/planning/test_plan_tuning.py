"""The plan of a run that tunes: which levers it compares, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from fasttrain.model.errors import FasttrainError
from fasttrain.model.tuning import Tuning
from fasttrain.planning.plan import make_plan
from fasttrain.planning.tuning import SHUTDOWN_S, TuningPlan, plan_tuning

ASKED = Tuning(60.0, "/var/tmp/scratch", ())


def tuned(make: Any, machine: Any, target: Any = None, **options: Any) -> TuningPlan:
    invocation = make.invocation(target=target)

    def plan(settings: Any) -> Any:
        return make_plan(settings, machine, invocation)

    return plan_tuning(plan, make.settings(**options), ASKED)


def test_compile_is_tried_although_it_is_off_by_default(make: Any) -> None:
    found = tuned(make, make.machine())
    assert found.plan.levers.compile.value.mode == "default"
    assert not found.plan.levers.compile.source.explicit, "nobody asked for it"
    assert found.levers == ("compile", "optimizer")
    assert set(found.left) == {"amp", "matmul"}
    assert found.plan.tuning == ASKED
    assert found.plan.shutdown_timeout_s == SHUTDOWN_S


def test_no_experiment_is_logged(make: Any) -> None:
    plan = tuned(make, make.machine()).plan
    assert make.variable(plan, "WANDB_MODE").value == "offline"
    assert make.variable(plan, "NEPTUNE_MODE").value == "offline"


def test_what_the_gpu_can_do_is_tried(make: Any) -> None:
    assert tuned(make, make.gpus(1)).levers == ("amp", "compile", "optimizer", "matmul")


def test_what_a_person_has_switched_off_is_not_tried(make: Any) -> None:
    found = tuned(make, make.gpus(1), compile="off", amp="off")
    assert found.levers == ("optimizer",)
    assert {"compile", "amp"} <= set(found.left)


def test_what_cannot_be_switched_is_left_on(make: Any) -> None:
    found = tuned(make, make.gpus(1), amp="fp16")
    assert "amp" not in found.levers
    assert "float16" in found.left["amp"]
    assert found.plan.levers.amp.value.precision == "float16"


def test_without_a_compiler_the_rest_is_compared(make: Any) -> None:
    found = tuned(make, make.machine(cxx_compiler=""))
    assert found.levers == ("optimizer",)
    assert found.plan.levers.compile.value.mode == "off"
    assert "compile" in found.left


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        ({"nproc_per_node": 2}, "tune-ranks"),
        ({"preempt": "snapshot"}, "tune-preempt"),
        ({"compile": "off", "optimizer": "keep"}, "tune-nothing"),
    ],
)
def test_what_cannot_be_tuned_is_refused(make: Any, options: Any, slug: str) -> None:
    with pytest.raises(FasttrainError) as caught:
        tuned(make, make.machine(), **options)
    assert caught.value.slug == slug


def test_a_command_cannot_be_tuned(make: Any) -> None:
    with pytest.raises(FasttrainError) as caught:
        tuned(make, make.machine(), make.command)
    assert caught.value.slug == "tune-command"


def test_errors_of_what_was_asked_for_are_not_hidden(make: Any) -> None:
    with pytest.raises(FasttrainError) as caught:
        tuned(make, make.machine(cxx_compiler=""), compile="default")
    assert caught.value.slug == "compile-compiler"
