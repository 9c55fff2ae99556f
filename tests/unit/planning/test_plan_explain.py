from __future__ import annotations

from dataclasses import replace

from fasttrain.model.levers import LEVERS
from fasttrain.planning.explain import Row, decisions


def test_one_row_per_decision_and_variable(make):
    plan = make.plan(make.gpus(2), gpus="all", env=("HF_TOKEN=x", "A=1"))
    rows = {row.topic: row for row in decisions(plan)}
    assert len(rows) == 7 + len(LEVERS) + len(plan.environment)
    assert rows.keys() >= LEVERS.keys()
    assert rows["device"].value == "cuda"
    assert rows["devices"].value == "0,1"
    assert rows["processes"].value == "2, torchrun"
    assert rows["A"] == Row("A", "1", make.variable(plan, "A").reason, "--env")
    assert rows["HF_TOKEN"].value == "***"


def test_values_in_words(make):
    plan = make.plan(make.machine(), nodes="1:4", rdzv_endpoint="h", compile="default",
                     compile_scope="blocks")  # fmt: skip
    values = {row.topic: row.value for row in decisions(plan)}
    assert values["devices"] == "none"
    assert values["processes"] == "1 on 1:4 nodes, torchrun"
    assert values["compile"] == "default, blocks"
    assert values["amp"] == "off"
    assert values["preempt"] == "signal"


def test_a_variable_that_is_unset_says_so(make):
    plan = make.plan(make.machine(), env=("A=1",))
    gone = replace(plan, environment=(replace(plan.environment[-1], value=None),))
    assert decisions(gone)[-1] == Row("A", "unset", make.variable(plan, "A").reason, "--env")


def test_a_source_names_the_place_to_change_it(make):
    rows = {row.topic: row for row in decisions(make.plan(make.machine(), amp="off"))}
    assert rows["amp"].source == "--amp"
    assert rows["compile"].source == "default"


def test_every_row_has_a_reason(make):
    for row in decisions(make.plan(make.gpus(2), gpus="all", debug=True, compile="default")):
        assert row.reason.strip()
        assert row.source
