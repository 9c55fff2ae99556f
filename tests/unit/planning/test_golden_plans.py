"""Whole plans for named machines, written by hand in tests/data/plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasttrain.model.codec import dumps, from_data, loads, to_data
from fasttrain.model.levers import LEVERS
from fasttrain.model.machine import Machine
from fasttrain.model.plan import LaunchPlan, Target

DATA = Path(__file__).parents[2] / "data"
CASES = sorted((DATA / "plans").glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_plan_is_the_golden_one(make, path):
    case = json.loads(path.read_text())
    machine = loads(Machine, (DATA / "machines" / f"{case['machine']}.json").read_text())
    target = from_data(Target, case["plan"]["target"])
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in case["options"].items()}
    plan = make.plan(machine, case["environ"], target, **options)
    _add_levers_that_are_off(case["plan"]["levers"], plan)
    golden = from_data(LaunchPlan, case["plan"])
    assert to_data(plan) == case["plan"]
    assert plan == golden
    assert loads(LaunchPlan, dumps(plan)) == plan


def _add_levers_that_are_off(levers, plan):
    """Complete a golden plan that says nothing of a lever: its row says what off is."""
    for name in LEVERS.keys() - levers.keys():
        decision = getattr(plan.levers, name)
        assert LEVERS[name].mode(decision.value) == LEVERS[name].off
        levers[name] = to_data(decision)


def test_a_golden_plan_need_not_name_a_lever_that_is_off(make):
    plan = make.plan(make.machine(), compile="off")
    levers = to_data(plan.levers)
    without = {name: levers[name] for name in levers if name != "compile"}
    _add_levers_that_are_off(without, plan)
    assert without == levers
    del without["amp"]
    with pytest.raises(AssertionError):
        _add_levers_that_are_off(without, make.plan(make.gpus(1)))


def test_every_named_machine_has_a_golden_plan():
    planned = {json.loads(path.read_text())["machine"] for path in CASES}
    assert planned >= {"8xh100", "4xt4", "8xascend910b", "cpu-laptop", "1xa100", "cpu-amx"}
