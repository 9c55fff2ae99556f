"""How often a run that failed is started again, behind what, and after how long."""

from __future__ import annotations

import pytest

from fasttrain.model.attempts import Restarts
from fasttrain.planning.guards import FAILURES
from fasttrain.planning.plan import MEETINGS


def test_a_run_is_not_restarted_unless_asked(make):
    decided = make.plan(make.machine()).restarts
    assert (decided.value.most, str(decided.source)) == (0, "default")


@pytest.mark.parametrize("on", ["auto", "any"])
def test_restarts_that_were_asked_for(make, on):
    decided = make.plan(make.machine(), max_restarts=3, restart_on=on).restarts
    assert (decided.value.most, decided.value.on) == (3, on)
    assert [failures for failures in FAILURES.values() if failures in decided.reason] == [
        FAILURES[on]
    ]
    assert " 2 s" in decided.reason


@pytest.mark.parametrize(
    ("barren", "seconds"), [(0, 2), (1, 2), (2, 4), (4, 16), (9, 300), (5000, 300)]
)
def test_the_delay_doubles_where_no_attempt_trains(barren, seconds):
    assert Restarts(3).delay_s(barren) == seconds


def test_what_has_no_effect_is_told(make):
    (warning,) = make.plan(make.machine(), restart_on="any").warnings
    assert warning.startswith("--restart-on ")
    assert "--max-restarts" in warning
    assert make.plan(make.machine(), restart_on="any", max_restarts=1).warnings == ()
    (warning,) = make.plan(make.machine(), rdzv_conf="read_timeout=9").warnings
    assert warning.startswith("--rdzv-conf ")
    assert MEETINGS["one node"] in warning


def test_settings_of_a_rendezvous_reach_torchrun(make):
    options = {"nodes": "1:2", "rdzv_endpoint": "head:1", "rdzv_conf": "last_call_timeout=3"}
    assert "--rdzv-conf=last_call_timeout=3" in make.plan(make.machine(), **options).argv
    assert not any("rdzv-conf" in word for word in make.plan(make.gpus(2), gpus="all").argv)
