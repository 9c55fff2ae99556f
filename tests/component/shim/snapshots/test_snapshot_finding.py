"""All ranks go on from the snapshot that rank 0 finds, in rank 0's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.model.attempts import NONE_YET, Preempt
from fasttrain.shim.snapshots import lever
from fasttrain.shim.snapshots.files import Manifest, Snapshots
from fasttrain.shim.snapshots.lever import compare, find, shared_folder

LIKE = {"script": "abc", "--amp": "off"}


class Store(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


@pytest.fixture
def ranks() -> list[Any]:
    store: Any = SimpleNamespace(kept=(kept := Store()), set=kept.set, get=kept.__getitem__)
    return [
        SimpleNamespace(rank=rank, world_size=2, store=store, waits=nullcontext)
        for rank in range(2)
    ]


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lever, "identity_of", lambda _: LIKE)
    return


def plan(run_dir: Path, resume: Any = "required", restarts: str = "torchrun") -> Any:
    return SimpleNamespace(
        run_dir=str(run_dir),
        preempt=SimpleNamespace(value=replace(Preempt("snapshot"), resume=resume)),
        processes=SimpleNamespace(value=SimpleNamespace(backend=restarts)),
    )


def take(run_dir: Path, step: int) -> None:
    snapshots = Snapshots(run_dir)
    snapshots.finish(Manifest(step, LIKE, {"rank-0.pt": snapshots.write("rank-0.pt", {}, step)}))


def test_the_other_ranks_follow_rank_0(tmp_path: Path, ranks: list[Any]) -> None:
    """Each node's launcher has a run directory of its own."""
    homes = [tmp_path / "run", tmp_path / "run/task-1"]
    homes[1].mkdir(parents=True)
    folders = [shared_folder(home, rank) for home, rank in zip(homes, ranks, strict=True)]
    assert folders == [homes[0], homes[0]]
    take(homes[0], 4)
    take(homes[0], 6)
    chosen = [find(plan(homes[0]), Snapshots(homes[0]), rank) for rank in ranks]
    # A snapshot that comes between their looks changes nothing.
    take(homes[0], 9)
    late = find(plan(homes[0]), Snapshots(homes[0]), ranks[1])
    assert [found.manifest.step for found in (*chosen, late) if found] == [6, 6, 6]


def test_where_there_is_none_all_begin_at_the_beginning(
    tmp_path: Path, ranks: list[Any], capfd: Any
) -> None:
    found = [find(plan(tmp_path, "if-there"), Snapshots(tmp_path), rank) for rank in ranks]
    assert found == [None, None]
    assert capfd.readouterr().err.count(NONE_YET) == 1


def test_a_run_that_is_not_to_go_on_looks_for_none(tmp_path: Path) -> None:
    take(tmp_path, 4)
    assert find(plan(tmp_path, "no"), Snapshots(tmp_path), None) is None


def test_workers_that_are_started_anew_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(tmp_path, 4)
    for count, goes_on in (("1", True), ("0", False), ("", False), ("abc", False)):
        monkeypatch.setenv("FASTTRAIN_RESTART_COUNT", count)
        found = find(plan(tmp_path, "no"), Snapshots(tmp_path), None)
        assert (found is not None) is goes_on


def refused(capfd: Any, act: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        act()
    assert caught.value.code == 78
    said: str = capfd.readouterr().err
    return said.rpartition("[")[2].strip().rstrip("]")


def test_refusals(tmp_path: Path, capfd: Any) -> None:
    def look() -> None:
        find(plan(tmp_path), Snapshots(tmp_path), None)

    assert refused(capfd, look) == "snapshot-missing"
    take(tmp_path, 4)
    (tmp_path / "snapshots/step-000000004/rank-0.pt").write_bytes(b"")
    assert refused(capfd, look) == "snapshot-damaged"
    (tmp_path / "snapshots").chmod(0o707)
    assert refused(capfd, look) == "snapshot-untrusted"


@pytest.mark.parametrize("name", LIKE)
def test_another_run_is_refused(name: str, capfd: Any) -> None:
    assert refused(capfd, lambda: compare(LIKE, {**LIKE, name: "other"})) == "snapshot-mismatch"
    compare(LIKE, dict(LIKE))
