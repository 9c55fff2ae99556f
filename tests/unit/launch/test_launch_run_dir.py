from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.run_dir.paths import latest_run_dir, new_run_id


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
    # Of four digits, as they were, some thirty of these would be equal; of eight, hardly ever two.
    assert len({new_run_id("train.py")[-8:] for _ in range(2_000)}) >= 1_998


def test_latest_run(tmp_path: Path, slug: Any) -> None:
    assert slug(latest_run_dir, tmp_path) == ("receipt", 69)
    for name in ("2026-01-02_a", "2026-01-10_b", "2025-12-31_c"):
        (tmp_path / "fasttrain_runs" / name).mkdir(parents=True)
        (tmp_path / "fasttrain_runs" / name / "plan.json").write_text("{}")
    (tmp_path / "fasttrain_runs" / "notes").mkdir()
    assert latest_run_dir(tmp_path).name == "2026-01-10_b"
