"""What a rank has of its own on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrain.shim.data_parallel.answers.own_copies import OwnCopies, path_of


@pytest.mark.parametrize("target", ["", 3, None, b""])
def test_what_has_no_name_has_no_path(target: object) -> None:
    assert path_of(target) == ""


@pytest.mark.parametrize("rank", [0, 3])
def test_the_folders_of_all_ranks_are_nobodys(rank: int, tmp_path: Path) -> None:
    copies = OwnCopies(rank, tmp_path / f"rank-{rank}.files")
    for name in ("rank-0.files", "rank-3.files", "rank-12.files/tmp/log.txt"):
        assert copies.is_own(str(tmp_path / name))
    for name in ("rank-3.txt", "other/rank-3.files", "rank-3.files.txt", "ranks/rank-1.files"):
        assert not copies.is_own(str(tmp_path / name))


def test_what_a_library_holds_by_name_is_kept(tmp_path: Path) -> None:
    copies = OwnCopies(1, tmp_path / "run/rank-1.files")
    kept, left = str(tmp_path / "runs.db"), str(tmp_path / "log.txt")
    for path in (kept, left):
        copies.to_write(path).write_text("own")
    copies.keep(kept)
    copies.forget_all()
    assert copies.to_read(kept) == copies.copy_of(kept)
    assert copies.to_read(left) is None
    assert not copies.copy_of(left).exists()
