"""How often a run that failed is started again, behind what, and after how long."""

from __future__ import annotations

import pytest

from fasttrain.model.plan import Restarts


def test_a_run_is_not_restarted_unless_asked(make):
    decided = make.plan(make.machine()).restarts
    assert (decided.value.most, decided.reason) == (0, "the default")


@pytest.mark.parametrize(("on", "word"), [("auto", "recoverable failures"), ("any", "any failure")])
def test_restarts_that_were_asked_for(make, on, word):
    decided = make.plan(make.machine(), max_restarts=3, restart_on=on).restarts
    assert (decided.value.most, decided.value.on) == (3, on)
    assert word in decided.reason
    assert "2 s later" in decided.reason


@pytest.mark.parametrize(
    ("barren", "seconds"), [(0, 2), (1, 2), (2, 4), (4, 16), (9, 300), (5000, 300)]
)
def test_the_delay_doubles_where_no_attempt_trains(barren, seconds):
    assert Restarts(3).delay_s(barren) == seconds


def test_what_has_no_effect_is_told(make):
    (warning,) = make.plan(make.machine(), restart_on="any").warnings
    assert warning == "--restart-on has no effect without --max-restarts."
    assert make.plan(make.machine(), restart_on="any", max_restarts=1).warnings == ()
    (warning,) = make.plan(make.machine(), rdzv_conf="read_timeout=9").warnings
    assert warning == "--rdzv-conf has no effect in a run on one node."


def test_settings_of_a_rendezvous_reach_torchrun(make):
    options = {"nodes": "1:2", "rdzv_endpoint": "head:1", "rdzv_conf": "last_call_timeout=3"}
    assert "--rdzv-conf=last_call_timeout=3" in make.plan(make.machine(), **options).argv
    assert not any("rdzv-conf" in word for word in make.plan(make.gpus(2), gpus="all").argv)
