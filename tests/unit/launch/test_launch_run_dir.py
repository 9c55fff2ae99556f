from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.run_dir import create, latest_run_dir, new_run_id, write_private
from fasttrain.spec.codec import loads
from fasttrain.spec.plan import LaunchPlan


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("tools/train.py", "_train_"),
        ("my package.module", "_my_package_"),
        ("../../etc/x;rm -rf.sh", "_x_rm_-rf_"),
        ("é\n$(x).py", "_____x__"),
        ("", "_run_"),
        ("y" * 300, f"_{'y' * 40}_"),
    ],
)
def test_run_id_is_a_harmless_file_name(target: str, part: str) -> None:
    name = new_run_id(target)
    assert part in name
    assert name.isascii()
    assert "/" not in name
    assert len(name) < 80


def test_run_ids_of_one_moment_differ() -> None:
    assert len({new_run_id("train.py") for _ in range(20)}) > 1


def test_directory_and_plan_are_private(plan: LaunchPlan) -> None:
    run_dir = create(plan)
    assert run_dir == Path(plan.run_dir)
    assert (mode(run_dir), mode(run_dir / "plan.json")) == (0o700, 0o600)
    assert loads(LaunchPlan, (run_dir / "plan.json").read_bytes()) == plan


def test_a_directory_that_is_there_becomes_private(plan: LaunchPlan) -> None:
    Path(plan.run_dir).mkdir(parents=True, mode=0o755)
    assert mode(create(plan)) == 0o700


def test_a_directory_serves_one_run(plan: LaunchPlan, slug: Any) -> None:
    create(plan)
    assert slug(create, plan) == ("run-dir-used", 71)


def test_a_directory_that_cannot_be(plan: LaunchPlan, slug: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in ("file", "file/below", "a\0b"):
        wrong = replace(plan, run_dir=str(tmp_path / path))
        assert slug(create, wrong) == ("run-dir", 71)


def test_a_private_file_replaces_one_that_was_open_to_others(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "é")
    assert (path.read_text(encoding="utf-8"), mode(path)) == ("é", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_latest_run(plan: LaunchPlan, tmp_path: Path, slug: Any) -> None:
    assert slug(latest_run_dir, tmp_path) == ("receipt", 69)
    for name in ("2026-01-02_a", "2026-01-10_b", "2025-12-31_c"):
        create(replace(plan, run_dir=str(tmp_path / "fasttrain_runs" / name)))
    (tmp_path / "fasttrain_runs" / "notes").mkdir()
    assert latest_run_dir(tmp_path).name == "2026-01-10_b"
