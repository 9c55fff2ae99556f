from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fasttrain.files import everybodys, owned
from fasttrain.launch.node_run import Ended
from fasttrain.launch.receipts import gather
from fasttrain.launch.run_dir.lock import (
    ENDED_WELL,
    begin,
    check_private,
    claim,
    make_run_dir,
    renew,
)
from fasttrain.model.codec import dumps, loads
from fasttrain.model.errors import FasttrainError
from fasttrain.model.plan import PLAN_FILE, LaunchPlan

SOMEBODY = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def take(path: Path, resume: Any = "no") -> tuple[str, ...]:
    with claim(str(path), resume) as claimed:
        return claimed.warnings


def test_directory_and_plan_are_private(plan: LaunchPlan) -> None:
    run_dir = make_run_dir(plan.run_dir, PLAN_FILE, dumps(plan))
    assert run_dir == Path(plan.run_dir)
    assert (mode(run_dir), mode(run_dir / "plan.json")) == (0o700, 0o600)
    assert loads(LaunchPlan, (run_dir / "plan.json").read_bytes()) == plan


def test_a_directory_that_is_there_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    assert take(tmp_path / "run") == ()
    assert mode(tmp_path / "run") == 0o700


def test_parents_that_are_made_are_never_open_to_everybody(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        take(tmp_path / "runs" / "run")
    finally:
        os.umask(before)
    assert mode(tmp_path / "runs") == 0o775


def test_git_does_not_see_the_folder_of_runs(tmp_path: Path) -> None:
    runs, elsewhere = tmp_path / "fasttrain_runs", tmp_path / "mine"
    take(runs / "r1")
    assert (runs / ".gitignore").read_text() == "*\n"
    (runs / ".gitignore").write_text("")  # of somebody who keeps them in git
    take(runs / "r2")
    assert (runs / ".gitignore").read_text() == ""
    take(elsewhere / "r1")
    assert [path.name for path in elsewhere.iterdir()] == ["r1"], "a folder of the user's own"


def test_a_directory_that_cannot_be(plan: LaunchPlan, slug: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    for path in ("file", "file/below", "a\0b", "circle", "circle/below"):
        assert slug(take, tmp_path / path) == ("run-dir", 71)


def test_a_full_disk_at_the_beginning(
    slug: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with claim(str(tmp_path / "run")) as claimed:
        monkeypatch.setattr(os, "fsync", full)
        assert slug(begin, claimed, PLAN_FILE, "{}") == ("run-dir", 71)


@as_root
def test_somebody_elses_directory_is_refused(slug: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", SOMEBODY, -1)
    assert slug(take, tmp_path / "run") == ("run-dir-unsafe", 71)
    assert slug(check_private, tmp_path / "run") == ("run-dir-unsafe", 71)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_directory_that_others_could_fill_is_refused(slug: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    assert slug(take, tmp_path / "run") == ("run-dir-unsafe", 71)
    assert slug(check_private, tmp_path / "run") == ("run-dir-unsafe", 71)
    (tmp_path / "run").chmod(0o700)
    assert check_private(tmp_path / "run") is None
    tmp_path.chmod(0o777)
    assert slug(take, tmp_path / "run") == ("run-dir-unsafe", 71)
    assert slug(take, tmp_path / "not" / "made") == ("run-dir-unsafe", 71)
    assert not (tmp_path / "not").exists()


@as_root
def test_who_could_put_another_there_is_told_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    os.chown(tmp_path / "project", SOMEBODY, -1)
    (told,) = take(tmp_path / "project" / "run")
    assert told.startswith(f"{owned(tmp_path / 'project', SOMEBODY)},")
    assert "--run-dir" in told


def test_in_a_folder_of_everybodys_it_is_told_and_no_more(
    slug: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As /workspace is in many images: who can put something there can change the script as well.
    here = tmp_path / "workspace"
    here.mkdir()
    here.chmod(0o777)
    monkeypatch.chdir(here)
    with claim(str(here / "runs" / "one")) as claimed:
        (told,) = claimed.warnings
    assert told.startswith(f"{everybodys(here)},")
    assert "--run-dir" in told
    assert (here / "runs" / "one").stat().st_mode & 0o777 == 0o700
    (here / "runs" / "one" / PLAN_FILE).touch()
    for sure in (lambda path: take(path, "required"), check_private):
        assert slug(sure, here / "runs" / "one")[0] == "run-dir-unsafe"
    assert slug(make_run_dir, str(here / "two"), PLAN_FILE, "")[0] == "run-dir-unsafe"
    other = tmp_path / "other"
    other.mkdir()
    other.chmod(0o777)
    assert slug(take, other / "run")[0] == "run-dir-unsafe"


def test_beside_the_script_on_a_file_system_without_modes(
    slug: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As Windows' disks under WSL: each folder shows 0777, whatever it is made with.
    mkdir = os.mkdir

    def modeless(path: Any, *_: Any, **how: Any) -> None:
        mkdir(path, **how)
        os.chmod(path, 0o777)  # noqa: PTH101

    monkeypatch.setattr(os, "mkdir", modeless)
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    here, elsewhere = tmp_path / "project", tmp_path / "mine"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    for name in ("one", "two"):  # the second in a folder that exists
        with claim(str(here / "fasttrain_runs" / name)) as claimed:
            (told,) = claimed.warnings
            assert told.startswith(f"{everybodys(here)},")
    assert slug(take, elsewhere / "run")[0] == "run-dir-unsafe", "not beside the script"
    (here / "existing").mkdir()
    assert slug(take, here / "existing")[0] == "run-dir-unsafe", "somebody else may have filled it"
    assert slug(make_run_dir, str(here / "job"), PLAN_FILE, "")[0] == "run-dir-unsafe"


def test_a_link_of_ones_own_may_lead_there(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(mode=0o755)
    (tmp_path / "run").symlink_to("scratch")
    take(tmp_path / "run")
    assert mode(tmp_path / "scratch") == 0o700


@pytest.mark.parametrize(
    "name", ["plan.json", "job.json", "receipt.json", "crash.json", "hang.json", "ends.json",
             "rank-0.log", "rank-12.child-345.json", "events-3.jsonl", "failure-0.json"],
)  # fmt: skip
def test_a_directory_serves_one_run(slug: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    assert slug(take, tmp_path) == ("run-dir-used", 71)


def test_files_of_the_user_are_not_of_a_run(tmp_path: Path) -> None:
    for name in ("notes.txt", "rank-list.md", "plan.json.txt"):
        (tmp_path / name).write_text("")
    assert take(tmp_path) == ()
    assert take(tmp_path) == (), "a lock that was let go of keeps nobody out"


def test_of_two_launchers_the_second_is_told_who_the_first_is(slug: Any, tmp_path: Path) -> None:
    with claim(str(tmp_path)) as claimed:
        begin(claimed, PLAN_FILE, "{}")
        with pytest.raises(FasttrainError) as caught:
            take(tmp_path)
        assert caught.value.slug == "run-dir-busy"
        assert f" {os.getpid()} " in caught.value.why
        assert slug(take, tmp_path) == ("run-dir-busy", 71)
    assert slug(take, tmp_path) == ("run-dir-used", 71)


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (told,) = take(tmp_path)
    assert "No locks available" in told


def test_what_an_attempt_told_is_put_aside_and_its_logs_stay(tmp_path: Path) -> None:
    told = {"receipt.json", "crash.json", "hang.json", "ends.json", "rank-0.json",
            "rank-0.child-7.json", "failure-1.json", "fault-1.txt", "heartbeat-0.json",
            "stacks-0.txt", "events-0.jsonl", "plan.json"}  # fmt: skip
    kept = {"job.json", "rank-0.log"}
    for name in told | kept:
        (tmp_path / name).write_text(name)
    assert renew(tmp_path, 0) == ""
    (tmp_path / "attempt-2").mkdir()  # of the attempts before, which it started again itself
    assert renew(tmp_path, 2) == "attempt-3"
    assert {path.name for path in tmp_path.iterdir()} == kept | {"attempt-2", "attempt-3"}
    assert {path.name for path in (tmp_path / "attempt-3").iterdir()} == told
    assert renew(tmp_path, 4) == ""


@pytest.mark.parametrize("resume", ["required", "if-there"])
def test_a_run_goes_on_in_its_directory(plan: LaunchPlan, resume: Any) -> None:
    run_dir = make_run_dir(plan.run_dir, PLAN_FILE, dumps(plan))
    told = {"receipt.json", "crash.json", "rank-0.json", "failure-1.json"}
    for name in [*told, "rank-0.log"]:
        (run_dir / name).write_text("{}")
    with claim(str(run_dir), resume):
        pass
    left = {path.name for path in run_dir.iterdir()}
    assert left == {"plan.json", "rank-0.log", "launcher.lock", "attempt-1"}
    assert {path.name for path in (run_dir / "attempt-1").iterdir()} == told


@pytest.mark.parametrize(("exit_code", "resume", "told"), [
    (0, "required", True), (85, "required", False), (0, "if-there", False)
])  # fmt: skip
def test_a_run_that_ended_well_is_told_that_its_end_comes_again(
    plan: LaunchPlan, exit_code: int, resume: Any, told: bool
) -> None:
    run_dir = make_run_dir(plan.run_dir, PLAN_FILE, dumps(plan))
    gather(plan, Ended(exit_code, 1.0))
    with claim(str(run_dir), resume) as claimed:
        assert any(ENDED_WELL in text for text in claimed.warnings) is told


def test_a_run_that_never_began_does_not_go_on(tmp_path: Path, slug: Any) -> None:
    def go_on(resume: Any) -> None:
        with claim(str(tmp_path / "run"), resume):
            pass

    assert slug(go_on, "required") == ("resume-missing", 71)
    assert not (tmp_path / "run").exists()
    go_on("if-there")
