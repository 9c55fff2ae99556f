from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.model.attempts import HangWatch


def hang(make, **options):
    return make.plan(make.machine(), **options).guards.hang


def test_hangs_are_watched_for_by_default(make):
    assert hang(make).value == HangWatch(on=True, timeout_s=None, action="stop")
    assert hang(make, on_hang="report").value.action == "report"


def test_a_time_of_the_users(make):
    decision = hang(make, hang_timeout="600")
    assert decision.value == HangWatch(on=True, timeout_s=600)
    assert str(decision.source) == "--hang-timeout"
    assert "--hang-timeout" in decision.reason
    assert not hang(make, hang_timeout="off").value.on


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "soon", "10s", "007"])
def test_what_is_no_time(make, text):
    error = make.refused(make.machine(), hang_timeout=text)
    assert (error.slug, error.exit_code) == ("hang-timeout", 2)


def test_a_system_without_proc(make):
    mac = replace(make.machine(), system="Darwin")
    decision = make.plan(mac).guards.hang
    assert not decision.value.on
    assert "Linux" in decision.reason
    assert make.refused(mac, hang_timeout="60").slug == "hang-timeout"


def test_a_command_is_not_watched(make):
    plan = make.plan(make.machine(), target=make.command)
    assert not plan.guards.hang.value.on
    assert plan.guards.nan.value == "off"
    for options in ({"hang_timeout": "60"}, {"on_nan": "stop"}):
        error = make.refused(make.machine(), target=make.command, **options)
        assert error.slug == "no-python-levers"
