"""Which Python runs the script, decided from what the Pythons have said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.model.decision import Decision, Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.machine import Interpreter
from fasttrain.planning.explain import Row, decisions
from fasttrain.planning.plan import make_plan
from fasttrain.planning.processes import ACTIVE, BY_NAME, ChosenPython, decide_python

OTHER = Interpreter("/env/bin/python", "", "3.12.1", "/env", "/env/lib/torch")
UNNAMED: Setting[str | None] = Setting(None, Source(SourceKind.DEFAULT, "default"))
NAMED: Setting[str | None] = Setting("/env/bin/python", Source(SourceKind.FILE, "fasttrain.yaml:3"))
BAD = [
    (replace(OTHER, error="there is no /env/bin/python"), ["there is no /env/bin/python"]),
    (replace(OTHER, version="3.10.14"), ["/env/bin/python", "Python 3.10.14", "3.11"]),
    (replace(OTHER, version="2.7.18"), ["/env/bin/python", "Python 2.7.18", "3.11"]),
    (replace(OTHER, torch=""), ["torch", "/env/bin/python"]),
]


def test_fasttrains_own_is_no_decision() -> None:
    assert decide_python(UNNAMED, "", None) == ChosenPython()
    assert decide_python(NAMED, "CONDA_PREFIX=/env", None) == ChosenPython()


def test_the_active_environments_is_taken() -> None:
    source = Source(SourceKind.ENV, "CONDA_PREFIX")
    decision = Decision(OTHER.path, ACTIVE, source)
    assert decide_python(UNNAMED, "CONDA_PREFIX=/env", OTHER) == ChosenPython(OTHER, decision)


def test_one_that_is_named_wins_over_the_active_environments() -> None:
    decision = Decision(OTHER.path, BY_NAME, NAMED.source)
    assert decide_python(NAMED, "VIRTUAL_ENV=/another", OTHER) == ChosenPython(OTHER, decision)


@pytest.mark.parametrize(("bad", "facts"), BAD)
def test_one_that_was_named_and_cant_run_the_script_is_an_error(bad, facts) -> None:
    with pytest.raises(FasttrainError) as caught:
        decide_python(NAMED, "", bad)
    assert caught.value.slug == "python-unusable"
    assert all(fact in caught.value.why for fact in facts)
    assert "fasttrain.yaml:3" in caught.value.fix


@pytest.mark.parametrize(("bad", "facts"), BAD)
def test_an_active_one_that_cant_run_the_script_is_told_and_left(bad, facts) -> None:
    chosen = decide_python(UNNAMED, "VIRTUAL_ENV=/env", bad)
    assert (chosen.other, chosen.decision) == (None, None)
    assert all(fact in chosen.note for fact in ["VIRTUAL_ENV=/env", *facts])


def test_the_plan_starts_it_and_says_why(make) -> None:
    decision = Decision(OTHER.path, BY_NAME, NAMED.source)
    invocation = replace(make.invocation(), python=OTHER.path, python_decision=decision)
    plan = make_plan(make.settings(nproc_per_node=2, strategy="none"), make.machine(), invocation)
    row = Row("python", OTHER.path, BY_NAME, "fasttrain.yaml:3")
    assert row in decisions(plan)
    assert plan.argv.count(OTHER.path) == 2  # the agent and the workers
