"""Snapshots on disk: whole or not there, the last two of them."""

from __future__ import annotations

import os
import pickle
import re
import stat
from typing import Any

import pytest
import torch

from fasttrain.files import everybodys, owned
from fasttrain.shim.snapshots.files import Manifest, Snapshots, UntrustedError


@pytest.fixture
def take(tmp_path: Any) -> Any:
    def take(step: int) -> None:
        snapshots = Snapshots(tmp_path)
        files = {
            name: snapshots.write(name, {"step": step, "weights": torch.ones(3)}, step)
            for name in ("shared.pt", "rank-0.pt")
        }
        snapshots.finish(Manifest(step, {"--amp": "off"}, files))

    return take


def test_what_was_written_is_read(tmp_path: Any, take: Any) -> None:
    take(7)
    found = Snapshots(tmp_path).newest()
    assert found is not None
    assert found.manifest.step == 7
    assert found.manifest.identity == {"--amp": "off"}
    assert found.read("shared.pt")["step"] == 7
    modes = {stat.S_IMODE(path.stat().st_mode) for path in found.path.iterdir()}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in (found.path, found.path.parent)}
    assert (folders, modes) == ({0o700}, {0o600})


def test_the_last_two_stay(tmp_path: Any, take: Any) -> None:
    for step in (9, 10, 100):
        take(step)
    left = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert left == ["step-000000010", "step-000000100"]


def test_one_that_was_not_finished_is_none(tmp_path: Any, take: Any) -> None:
    take(1)
    snapshots = Snapshots(tmp_path)
    snapshots.write("shared.pt", {}, 2)
    found = snapshots.newest()
    assert found is not None
    assert found.manifest.step == 1
    take(3)
    assert not list((tmp_path / "snapshots").glob("draft-*"))


@pytest.mark.parametrize("harm", ["manifest", "file", "missing"])
def test_a_damaged_one_is_passed_over(tmp_path: Any, take: Any, capfd: Any, harm: str) -> None:
    take(1)
    take(2)
    newest = tmp_path / "snapshots/step-000000002"
    if harm == "missing":
        (newest / "rank-0.pt").unlink()
    else:
        path = newest / ("manifest.json" if harm == "manifest" else "shared.pt")
        path.write_bytes(path.read_bytes()[:-3])
    found = Snapshots(tmp_path).newest()
    assert found is not None
    assert found.manifest.step == 1
    assert " step-000000002 " in capfd.readouterr().err


def test_there_may_be_none(tmp_path: Any, take: Any) -> None:
    snapshots = Snapshots(tmp_path)
    assert (snapshots.newest(), snapshots.any) == (None, False)
    take(1)
    (tmp_path / "snapshots/step-000000001/manifest.json").unlink()
    assert (snapshots.newest(), snapshots.any) == (None, True)


def test_a_manifest_of_other_fields_is_damaged(tmp_path: Any, take: Any) -> None:
    take(1)
    path = tmp_path / "snapshots/step-000000001/manifest.json"
    path.write_text(path.read_text().replace('"step"', '"steps"'))
    assert Snapshots(tmp_path).newest() is None


@pytest.mark.parametrize("place", [".", "snapshots", "snapshots/step-000000001"])
def test_a_folder_into_which_others_can_write_is_not_read(
    tmp_path: Any, take: Any, place: str
) -> None:
    take(1)
    (tmp_path / place).chmod(0o702)
    with pytest.raises(UntrustedError, match=re.escape(everybodys("it"))):
        Snapshots(tmp_path).newest()
    with pytest.raises(UntrustedError):
        Snapshots(tmp_path).named("step-000000001")
    with pytest.raises(UntrustedError):
        Snapshots(tmp_path).prepare()


def test_a_folder_of_somebody_else_is_not_read(
    tmp_path: Any, take: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(1)
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UntrustedError, match=re.escape(owned("it", tmp_path.stat().st_uid))):
        Snapshots(tmp_path).newest()


def test_nothing_in_a_file_is_run(tmp_path: Any, take: Any) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "run by loading"),)

    take(1)
    torch.save(Evil(), tmp_path / "snapshots/step-000000001/shared.pt")
    found = Snapshots(tmp_path).named("step-000000001")
    with pytest.raises(pickle.UnpicklingError):
        found.read("shared.pt")
    assert not (tmp_path / "run by loading").exists()


def test_a_file_that_rank_0_does_not_see_leaves_it_unfinished(tmp_path: Any) -> None:
    snapshots = Snapshots(tmp_path)
    files = {"rank-0.pt": snapshots.write("rank-0.pt", {}, 1), "rank-1.pt": "of another disk"}
    with pytest.raises(FileNotFoundError):
        snapshots.finish(Manifest(1, {}, files))
    assert snapshots.newest() is None
