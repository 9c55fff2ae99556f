"""The plan of a run that tunes: which levers it compares, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasttrain.model.errors import FasttrainError
from fasttrain.model.tuning import Ratio, Tuned, TunedFor, TunedResults, Tuning
from fasttrain.planning.plan import make_plan
from fasttrain.planning.tuning import (
    SHUTDOWN_S,
    TuningPlan,
    find_tuned,
    plan_tuning,
    tuned_for,
    use_tuned,
)

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


def test_what_is_left_to_the_run_is_tried(make: Any) -> None:
    found = tuned(make, make.machine(), compile="auto")
    assert found.plan.levers.compile.value.asked == "default"
    assert "compile" in found.levers


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
        ({"nproc_per_node": 2, "strategy": "none"}, "tune-ranks"),
        ({"nproc_per_node": 2, "strategy": "fsdp"}, "tune-ranks"),
        ({"nodes": "2", "node_rank": 0, "master_addr": "localhost"}, "tune-ranks"),
        ({"preempt": "snapshot"}, "tune-preempt"),
        ({"compile": "off", "optimizer": "keep"}, "tune-nothing"),
    ],
)
def test_what_cannot_be_tuned_is_refused(make: Any, options: Any, slug: str) -> None:
    with pytest.raises(FasttrainError) as caught:
        tuned(make, make.machine(), **options)
    assert caught.value.slug == slug


def test_ranks_of_one_node_are_tuned_together(make: Any) -> None:
    found = tuned(make, make.gpus(2), gpus="0,1")
    assert found.levers == ("amp", "compile", "optimizer", "matmul")
    assert found.left == {}, "what makes them one run is no choice"
    assert found.plan.processes.value.backend == "torchrun"


def test_a_command_cannot_be_tuned(make: Any) -> None:
    with pytest.raises(FasttrainError) as caught:
        tuned(make, make.machine(), make.command)
    assert caught.value.slug == "tune-command"


def test_errors_of_what_was_asked_for_are_not_hidden(make: Any) -> None:
    with pytest.raises(FasttrainError) as caught:
        tuned(make, make.machine(cxx_compiler=""), compile="default")
    assert caught.value.slug == "compile-compiler"


# --- what later runs make of a result

OF = TunedFor("/home/me/train.py", ("--lr", "3"), "abc", ("cuda", "NVIDIA H100"), "2.13.0", "0.1.0")
TUNED = Tuned(OF, "2026-11-26", {"compile": "default", "amp": "off"}, Ratio(0.5, 0.6, 0.7))


def used(make: Any, machine: Any, tuned: Tuned = TUNED, **options: Any) -> Any:
    def plan(settings: Any) -> Any:
        return make_plan(settings, machine, make.invocation())

    settings = make.settings(**options)
    return use_tuned(plan, settings, tuned, plan(settings), {})


def test_a_result_takes_the_place_of_defaults(make: Any) -> None:
    plan = used(make, make.gpus(1))
    assert plan.levers.compile.value.mode == "default"
    assert plan.levers.amp.value.precision == "off"
    for decision in (plan.levers.compile, plan.levers.amp):
        assert str(decision.source) == decision.reason == "tuned on 2026-11-26"
        assert not decision.source.explicit, "nobody asked for it"
    (hint,) = (hint for hint in plan.hints if "2026-11-26" in hint)
    assert "0.60 (0.50 to 0.70)" in hint


def test_what_a_person_says_is_stronger(make: Any) -> None:
    plan = used(make, make.gpus(1), compile="off")
    assert plan.levers.compile.value.mode == "off"
    assert plan.levers.amp.value.precision == "off"
    assert str(plan.levers.compile.source) == "--compile"
    (hint,) = (hint for hint in plan.hints if "2026-11-26" in hint)
    assert "0.60" not in hint, "measured with compile"


def test_a_result_that_can_not_be_used_is_told(make: Any) -> None:
    plan = used(make, make.gpus(1, cxx_compiler=""))
    assert plan.levers.compile.value.mode == "off"
    assert plan.levers.amp.value.precision == "bfloat16"
    assert any("2026-11-26" in warning for warning in plan.warnings)


def test_a_result_is_found_by_what_it_holds_for(make: Any) -> None:
    older = replace(TUNED, date="2026-01-01")
    here = tuned_for(make.plan(make.gpus(1)), make.gpus(1), "abc")
    assert here == OF
    on_cpu = tuned_for(make.plan(make.gpus(1), device="cpu"), make.gpus(1), "abc")
    assert on_cpu.devices == ("cpu", "NVIDIA H100")
    assert find_tuned(TunedResults((older, TUNED)), here) == (TUNED, "")
    assert find_tuned(TunedResults((TUNED, older)), here) == (older, ""), "the latest"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"args": ("--lr", "4")}, "args --lr 4 then, --lr 3 now"),
        ({"args": ()}, "args none then"),
        ({"torch": "2.12.0"}, "torch 2.12.0 then, 2.13.0 now"),
        ({"fasttrain": "0.0.9"}, "fasttrain 0.0.9 then"),
        ({"devices": ("cuda", "Tesla T4")}, "devices cuda Tesla T4 then, cuda NVIDIA H100 now"),
        ({"source": "def"}, "the script's file has changed"),
        ({"script": "/home/me/other.py"}, ""),
    ],
)
def test_a_stale_result_is_told_and_not_used(make: Any, changes: Any, told: str) -> None:
    results = TunedResults((replace(TUNED, of=replace(OF, **changes)),))
    found, stale = find_tuned(results, OF)
    assert found is None
    assert told in stale
    assert ("2026-11-26" in stale) == bool(told)
