"""Whole plans for named machines, written by hand in tests/data/plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasttrain.model.codec import dumps, from_data, loads, to_data
from fasttrain.model.machine import Machine
from fasttrain.model.plan import LaunchPlan

DATA = Path(__file__).parents[2] / "data"
CASES = sorted((DATA / "plans").glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_plan_is_the_golden_one(make, path):
    case = json.loads(path.read_text())
    machine = loads(Machine, (DATA / "machines" / f"{case['machine']}.json").read_text())
    golden = from_data(LaunchPlan, case["plan"])
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in case["options"].items()}
    plan = make.plan(machine, case["environ"], golden.target, **options)
    assert to_data(plan) == case["plan"]
    assert plan == golden
    assert loads(LaunchPlan, dumps(plan)) == plan


def test_every_named_machine_has_a_golden_plan():
    planned = {json.loads(path.read_text())["machine"] for path in CASES}
    assert planned >= {"8xh100", "4xt4", "8xascend910b", "cpu-laptop", "1xa100", "cpu-amx"}
