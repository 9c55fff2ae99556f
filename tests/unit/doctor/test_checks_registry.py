"""All checks together: none without tests, healthy machines without alarms, choice by slug."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.doctor.diagnosis import CHECKS, diagnose, worst_first
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.machine import Cpu, Examination, Finding, Machine, Torch, TorchTrial
from support.examinations import container, node

HERE = Path(__file__).parent

FILES = ("torch", "devices", "host", "environment", "network")
CASES: list[Any] = [
    case for name in FILES for case in runpy.run_path(str(HERE / f"test_checks_{name}.py"))["CASES"]
]
SLUGS = [check.slug for check in CHECKS]
RANKS = ["error", "warning", "hint"]


def test_every_check_has_a_case_that_fires_and_one_that_does_not() -> None:
    assert [slug for slug in SLUGS if slug not in {c.slug for c in CASES if c.severity}] == []
    assert [slug for slug in SLUGS if slug not in {c.slug for c in CASES if not c.severity}] == []


def test_there_are_at_least_thirty_checks_with_names_of_their_own() -> None:
    assert len(SLUGS) >= 30
    assert len(set(SLUGS)) == len(SLUGS)
    assert [slug for slug in SLUGS if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug)] == []


def test_what_a_check_is_about_fits_a_line_of_the_list() -> None:
    for check in CHECKS:
        # on a terminal of 80 columns the list leaves this much beside a slug of 20
        assert 0 < len(check.about) <= 77 - max(map(len, SLUGS)), check.about
        assert "\n" not in check.about
        assert check.about[-1] not in ".:"


def test_a_healthy_server_and_a_plain_container_raise_no_alarm() -> None:
    found = {f.check: f.severity for seen in (node(), container()) for f in diagnose(seen)}
    assert found == {"numa": "hint"}


def test_what_is_unknown_is_nothing() -> None:
    machine = Machine("box", "Linux", "3.11.9", Torch("2.13.0", "cpu"), Cpu("CPU", 4, "affinity"))
    bare = Examination(machine=machine)
    assert [finding.check for finding in diagnose(bare)] == ["cxx-compiler"]
    asked = Examination(machine=machine, torch=TorchTrial())
    assert [finding.check for finding in diagnose(asked)] == ["cxx-compiler"]


def test_without_the_trial_of_torch_its_checks_say_nothing() -> None:
    quick = replace(node(), torch=None)
    assert [finding.check for finding in diagnose(quick)] == ["numa"]


def test_the_worst_comes_first_and_then_the_order_of_the_list() -> None:
    seen = node(
        host={"shm_bytes": 2**26, "open_files": (1024, 1024), "hostname_resolves": False},
        trial={"backends": ("gloo",), "triton": ""},
        states={1: {"rows_failed": True}},
    )
    found: tuple[Finding, ...] = diagnose(seen)
    order = [(RANKS.index(f.severity), SLUGS.index(f.check)) for f in found]
    assert order == sorted(order)
    assert {f.severity for f in found} == set(RANKS)


def test_what_is_added_to_findings_goes_among_its_like() -> None:
    slugs = [("a", "warning"), ("b", "hint"), ("c", "error"), ("d", "warning")]
    findings = [Finding(slug, severity, "", "", "") for slug, severity in slugs]
    assert [finding.check for finding in worst_first(findings)] == ["c", "a", "d", "b"]


def test_checks_are_chosen_and_left_out_by_slug() -> None:
    seen = node(host={"shm_bytes": 2**26, "hostname_resolves": False})
    everything = [finding.check for finding in diagnose(seen)]
    assert everything == ["shared-memory", "hostname", "numa"]
    assert [f.check for f in diagnose(seen, only=("hostname", "numa"))] == ["hostname", "numa"]
    assert [f.check for f in diagnose(seen, skip=("hostname",))] == ["shared-memory", "numa"]
    assert diagnose(seen, only=("numa",), skip=("numa",)) == ()


@pytest.mark.parametrize("option", ["only", "skip"])
def test_a_misspelt_slug_names_the_nearest(option: str) -> None:
    with pytest.raises(FasttrainError) as caught:
        diagnose(container(), **{option: ("hostnam",)})
    assert caught.value.slug == "doctor-check"
    assert caught.value.exit_code is ExitCode.USAGE
    assert "hostname?" in caught.value.fix
    assert "hostnam'" in caught.value.what


def test_a_slug_like_none_points_at_the_list() -> None:
    with pytest.raises(FasttrainError) as caught:
        diagnose(container(), only=("zzzzzz",))
    assert "--list" in caught.value.fix
