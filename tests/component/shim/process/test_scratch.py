from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import multiprocessing.synchronize  # an unprivileged user may be unable to read it
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fasttrain.files import remove_whole
from fasttrain.shim.process.scratch import CannotIsolate, isolate

NOBODY = 65534
NEWNS, NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_NOEXEC, MS_REMOUNT, MS_REC, MS_PRIVATE, MS_SHARED = (
    1,
    8,
    32,
    1 << 14,
    1 << 18,
    1 << 20,
)
PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_DUMPABLE = 1, 2, 3, 4
LIBC = ctypes.CDLL(None, use_errno=True)


def libc(name: str, *arguments: object) -> int:
    result: int = getattr(LIBC, name)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return result


def become_nobody() -> None:
    """Go on as an unprivileged user, as a program does that setpriv starts."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    libc("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)


def in_fork(act: Callable[[], Any]) -> Any:
    """Return what a function returns that a process of its own calls; JSON must hold it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        told: dict[str, Any] = {}
        try:
            told["value"] = act()
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            told = {"error": traceback.format_exc(), "kind": type(error).__name__}
        with suppress(BaseException):
            os.write(writer, json.dumps(told).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:  # noqa: PTH123 - a descriptor
        text = pipe.read()
    os.waitpid(pid, 0)
    told = json.loads(text)
    if told.get("kind") == "CannotIsolate":
        raise CannotIsolate(told["error"].strip().splitlines()[-1])
    assert "error" not in told, told["error"]
    return told["value"]


@cache
def refused_by_kernel(who: str) -> str:
    """Return why there can be no namespaces here, asking another program than ours."""
    words = ["unshare", "--mount", "true"]
    if who == "user":
        words[1:1] = ["--user", "--map-root-user"]
        if not os.geteuid():
            own = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
            words = ["setpriv", *own, *words]
    return subprocess.run(words, capture_output=True, text=True).stderr.strip()


@dataclass(frozen=True)
class Place:
    """Folders of a user's, and the user: root, or one without rights."""

    base: Path
    who: str

    @property
    def cwd(self) -> Path:
        return self.base / "project"

    @property
    def home(self) -> Path:
        return self.base / "home"

    @property
    def tmp(self) -> Path:
        return self.base / "tmp"

    @property
    def elsewhere(self) -> Path:
        return self.base / "elsewhere"

    @property
    def kept(self) -> Path:
        return self.cwd / "kept"

    @property
    def scratch(self) -> Path:
        return self.tmp / "scratch"

    @property
    def folders(self) -> list[Path]:
        return [self.cwd, self.cwd / "deeper", self.home, self.tmp, self.base / "none"]

    def make(self) -> None:
        for it in (self.cwd, self.home, self.tmp, self.elsewhere, self.kept, self.scratch):
            it.mkdir(0o700, parents=True)
        for it in (self.cwd, self.home, self.elsewhere):
            (it / "old").write_text("old")
            (it / "gone").write_text("gone")
            (it / "folder" / "inner").mkdir(parents=True)
            (it / "folder" / "file").write_text("file")
        (self.cwd / "deeper").mkdir()
        for it in (self.base, *self.base.rglob("*")):
            if self.who == "user" and not os.geteuid():
                os.chown(it, NOBODY, NOBODY)

    def become(self) -> None:
        if self.who == "user" and not os.geteuid():
            become_nobody()
        os.chdir(self.cwd)
        tempfile.tempdir = str(self.tmp)

    def isolate(self) -> tuple[str, ...]:
        return isolate(self.scratch, [self.kept], self.folders)

    def run(self, act: Callable[[], Any]) -> Any:
        """Return what an isolated process returns that calls a function."""

        def isolated() -> Any:
            self.become()
            self.isolate()
            return act()

        return in_fork(isolated)

    def state(self) -> dict[str, tuple[int, int, str]]:
        """Return all that is there, but for the scratch folder."""
        found = {}
        for it in sorted(self.base.rglob("*")):
            if not it.is_relative_to(self.scratch):
                seen = it.lstat()
                text = it.read_text() if it.is_file() else ""
                found[str(it)] = (seen.st_mode, seen.st_mtime_ns, text)
        return found


@pytest.fixture(params=["root", "user"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    yield from made(request.param)


@pytest.fixture
def of_user() -> Iterator[Place]:
    yield from made("user")


@pytest.fixture
def of_root() -> Iterator[Place]:
    yield from made("root")


def made(who: str) -> Iterator[Place]:
    if who == "root" and os.geteuid():
        pytest.skip("only root can try what root can do")
    if why := refused_by_kernel(who):
        pytest.skip(f"the kernel refuses namespaces: {why}")
    # pytest's own folder is closed to other users.
    base = Path(tempfile.mkdtemp(prefix="fasttrain-scratch-")).resolve()
    place = Place(base, who)
    place.make()
    yield place
    remove_whole(base)


def names(folder: Path | str) -> list[str]:
    return sorted(it.name for it in Path(folder).iterdir())


def has(error: int, act: Callable[[], object]) -> bool:
    """True if a function fails with an error number."""
    try:
        act()
    except OSError as caught:
        if caught.errno == error:
            return True
        raise
    return False


def test_what_is_written_is_seen_inside_and_only_there(place: Place) -> None:
    before = place.state()

    def script() -> None:
        for folder in (place.cwd, place.home):
            (folder / "new").write_text("new")
            with (folder / "old").open("a") as file:
                file.write("er")
            (folder / "gone").unlink()
            (folder / "folder" / "file").rename(folder / "moved")
            (folder / "folder" / "inner").rmdir()
            (folder / "link").symlink_to("old")
            (folder / "moved").chmod(0o600)
            assert (folder / "link").read_text() == "older"
            assert names(folder / "folder") == []
            shutil.rmtree(folder / "folder")
            (folder / "folder").mkdir()
            assert names(folder / "folder") == [], "a folder that is made again is empty"
            left = {"new", "old", "moved", "link", "folder"}
            assert set(names(folder)) - {"kept", "deeper"} == left
        (place.tmp / "t").write_text("t")
        assert Path("new").read_text() == "new", "the working directory is the one of before"
        assert Path.cwd() == place.cwd
        (place.cwd / "deeper" / "new").write_text("new")

    place.run(script)
    assert place.state() == before
    assert list(place.scratch.rglob("new")), "it was written into the scratch folder"


def test_the_folders_that_are_covered_are_told(place: Place) -> None:
    def isolated() -> Any:
        place.become()
        return place.isolate()

    assert in_fork(isolated) == sorted(map(str, (place.cwd, place.home, place.tmp)))


def test_writes_elsewhere_fail(place: Place) -> None:
    old, folder = place.elsewhere / "old", place.elsewhere / "folder"

    def script() -> list[bool]:
        acts: list[Callable[[], object]] = [
            lambda: old.write_text("x"),
            lambda: old.open("a"),
            lambda: (place.elsewhere / "new").touch(),
            old.unlink,
            lambda: old.rename(folder / "old"),
            lambda: (folder / "inner").rmdir(),
            lambda: old.chmod(0o600),
            lambda: os.utime(old),
            lambda: (place.base / "new").mkdir(),
            lambda: os.truncate(old, 0),
        ]
        assert old.read_text() == "old"
        return [has(errno.EROFS, act) for act in acts]

    before = place.state()
    assert all(place.run(script))
    assert place.state() == before


def test_folders_to_keep_are_written_for_real(place: Place) -> None:
    def isolated() -> None:
        place.become()
        isolate(place.scratch, [place.kept, place.elsewhere], place.folders)
        for folder in (place.kept, place.elsewhere):
            (folder / "real").write_text("real")
            (folder / "real").replace(folder / "renamed")
        (place.cwd / "not").write_text("")

    in_fork(isolated)
    for folder in (place.kept, place.elsewhere):
        assert (folder / "renamed").read_text() == "real"
    assert not (place.cwd / "not").exists()


def test_what_is_kept_stays_so_in_a_covered_folder_and_around_one(place: Place) -> None:
    def isolated() -> Any:
        place.become()
        covered = isolate(
            place.scratch, [place.home, place.kept], [place.home / "folder", place.cwd]
        )
        (place.home / "folder" / "real").touch()
        return covered

    assert in_fork(isolated) == [str(place.cwd)]
    assert (place.home / "folder" / "real").exists()


def test_children_are_isolated_too(place: Place) -> None:
    def script() -> str:
        subprocess.run(["touch", "new", "old"], check=True)
        subprocess.run(["rm", "gone"], check=True)
        denied = subprocess.run(
            ["touch", str(place.elsewhere / "new")], stderr=subprocess.PIPE, text=True
        )
        assert Path("new").exists()
        assert not Path("gone").exists()
        return denied.stderr

    before = place.state()
    assert "Read-only file system" in place.run(script)
    assert place.state() == before


def by_sqlite() -> None:
    for journal in ("delete", "wal"):
        with sqlite3.connect("data.db") as base:
            base.execute(f"pragma journal_mode={journal}")
            base.execute("create table if not exists t (a)")
            base.execute("insert into t values (1)")
        base.close()
    with sqlite3.connect("data.db") as base:
        assert base.execute("select sum(a) from t").fetchone() == (2,)
    base.close()


def by_replacing() -> None:
    Path("draft").write_text("new")
    Path("draft").replace("old")
    assert Path("old").read_text() == "new"


def by_renaming_new_folders() -> None:
    Path("tmp-checkpoint/a").mkdir(parents=True)
    Path("tmp-checkpoint").rename("checkpoint")
    assert names("checkpoint") == ["a"]


def by_mapped_memory() -> None:
    with Path("old").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0:3] = b"new"
        memory.flush()
    assert Path("old").read_bytes() == b"new"


def by_temporary_files() -> None:
    with tempfile.TemporaryFile() as file, tempfile.NamedTemporaryFile() as named:
        file.write(b"x")
        assert Path(named.name).exists()
    with tempfile.TemporaryDirectory() as folder:
        assert Path(folder).parent == Path(tempfile.gettempdir())
    try:
        descriptor = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:  # before Linux 6.1; tempfile does without it then
        if error.errno == errno.EOPNOTSUPP:
            return
        raise
    os.write(descriptor, b"x")
    here = os.open(".", os.O_DIRECTORY)  # without a folder, Python would link what is in /proc
    os.link(f"/proc/self/fd/{descriptor}", "linked", dst_dir_fd=here)
    assert Path("linked").read_bytes() == b"x"


def by_locks() -> None:
    with Path("old").open("a") as file, Path("old").open("a") as other:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert has(errno.EAGAIN, lambda: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB))
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert in_fork(
            lambda: has(errno.EAGAIN, lambda: fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB))
        )


def by_hard_links() -> None:
    Path("new").touch()
    for name in ("old", "new"):
        os.link(name, f"{name} too")
        Path(name).write_text("changed")
        assert Path(f"{name} too").read_text() == "changed"
    assert Path("new").samefile("new too")


@pytest.mark.parametrize(
    "script",
    [
        by_sqlite, by_replacing, by_renaming_new_folders, by_mapped_memory, by_temporary_files,
        by_locks, by_hard_links,
    ],
)  # fmt: skip
def test_ways_to_write(place: Place, script: Callable[[], None]) -> None:
    before = place.state()
    place.run(script)
    assert place.state() == before


def test_renaming_a_folder_of_before(place: Place) -> None:
    def script() -> bool:
        refused = has(errno.EXDEV, lambda: Path("folder").rename("other"))
        if refused:
            shutil.move("folder", "other")
        assert Path("other/file").read_text() == "file"
        assert not Path("folder").exists()
        return refused

    before = place.state()
    assert place.run(script) == (place.who == "user")
    assert place.state() == before


def test_devices_and_proc_are_as_before(place: Place) -> None:
    name = f"fasttrain-scratch-{os.getpid()}"

    def script() -> None:
        for device in ("null", "zero", "full", "random"):
            os.close(os.open(f"/dev/{device}", os.O_RDWR))
        Path("/dev/null").write_text("x")
        Path("/proc/self/comm").write_text("renamed")
        assert Path("/proc/self/comm").read_text() == "renamed\n"
        with multiprocessing.get_context("fork").Lock():
            pass
        Path("/dev/shm", name).write_text("shared")
        assert names("/sys/kernel")

    try:
        place.run(script)
        assert Path("/dev/shm", name).read_text() == "shared"
    finally:
        Path("/dev/shm", name).unlink(missing_ok=True)


def test_shared_memory_is_never_covered_but_a_folder_in_it_is(place: Place) -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    folder.chmod(0o777)

    def isolated() -> Any:
        place.become()
        covered = isolate(place.scratch, [], [Path("/dev/shm"), folder, Path("/proc/self")])
        (folder / "new").touch()
        return covered

    try:
        assert in_fork(isolated) == [str(folder)]
        assert names(folder) == []
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["a b", "a,b", "a:b", "a\\b", "a\"b'", "a\nb", "é\udcff", "a=b%s"])
def test_any_name_will_do(place: Place, name: str) -> None:
    project, scratch, kept = (place.tmp / kind / name for kind in ("project", "scratch", "kept"))

    def isolated() -> Any:
        place.become()
        for it in (project, scratch, kept):
            it.mkdir(0o700, parents=True)
        os.chdir(project)
        covered = isolate(scratch, [kept], [project, place.home])
        Path("new").touch()
        (kept / "real").touch()
        return covered, names("."), str(Path.cwd())

    covered, inside, cwd = in_fork(isolated)
    assert covered == [str(place.home), str(project)]
    assert (inside, cwd) == (["new"], str(project))
    assert names(project) == []
    assert names(kept) == ["real"]


def test_the_process_keeps_who_it_is(place: Place) -> None:
    def seen() -> Any:
        status = Path("/proc/self/status").read_text().splitlines()
        rights = [it for it in status if it.startswith(("Cap", "Uid", "Gid"))]
        asked = ctypes.c_int()
        libc("prctl", PR_GET_PDEATHSIG, ctypes.byref(asked), 0, 0, 0)
        return rights, asked.value, libc("prctl", PR_GET_DUMPABLE, 0, 0, 0, 0), os.getpid()

    def isolated() -> Any:
        place.become()
        libc("prctl", PR_SET_PDEATHSIG, int(signal.SIGUSR1), 0, 0, 0)
        before = seen()
        place.isolate()
        Path("new").touch()
        own = (Path("new").stat().st_uid, Path("old").stat().st_uid)
        return before, seen(), own, [os.getuid(), os.getgid()]

    before, after, own, ids = in_fork(isolated)
    assert after == before
    assert before[1] == signal.SIGUSR1
    user = os.geteuid() or (NOBODY if place.who == "user" else 0)
    assert own == [user, user]
    assert ids[0] == user


def test_no_right_is_won(of_user: Place) -> None:
    if os.geteuid():
        pytest.skip("only root can make files of root's")
    place = of_user
    for folder in (place.cwd, place.elsewhere):
        (folder / "secret").write_text("secret")
        (folder / "secret").chmod(0o600)
        (folder / "vault").mkdir(0o700)
        (folder / "vault" / "x").touch()
    foreign = place.base / "foreign"
    foreign.mkdir(0o755)

    def isolated() -> Any:
        place.become()
        (place.cwd / "old").chmod(0o400)
        isolate(place.scratch, [], [*place.folders, foreign])
        denied = [
            has(errno.EACCES, act)
            for folder in (place.cwd, place.elsewhere)
            for act in (
                (folder / "secret").read_text,
                lambda it=folder: names(it / "vault"),
                lambda it=folder: (it / "vault" / "x").stat(),
            )
        ]
        denied.append(has(errno.EACCES, lambda: (place.cwd / "secret").open("a")))
        denied.append(has(errno.EACCES, lambda: (place.cwd / "old").open("a")))
        denied.append(has(errno.EACCES, lambda: (foreign / "new").touch()))
        denied.append(has(errno.EPERM, lambda: libc("mount", b"t", b"/", b"tmpfs", 0, None)))
        denied.append(has(errno.EPERM, lambda: libc("umount2", os.fsencode(place.cwd), 2)))
        return denied

    assert all(in_fork(isolated))


def test_a_folder_shows_its_own_owner_and_mode(of_root: Place) -> None:
    place = of_root
    place.home.chmod(0o2750)
    os.chown(place.home, 12, 34)
    place.tmp.chmod(0o1777)

    def script() -> Any:
        (place.home / "new").touch()
        seen = [it.stat() for it in (place.home, place.tmp, place.home / "new")]
        return [[it.st_uid, it.st_gid, stat.S_IMODE(it.st_mode)] for it in seen]

    home, tmp, new = place.run(script)
    assert (home, tmp) == ([12, 34, 0o2750], [0, 0, 0o1777])
    assert new[1] == 34, "a new file has the folder's group"


def test_a_killed_process_leaves_nothing_mounted(place: Place) -> None:
    kept_closed = place.elsewhere / "folder"
    kept_closed.chmod(0o500)
    before = Path("/proc/self/mountinfo").read_text()
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            place.become()
            place.isolate()
            Path("new").touch()
            Path("old").write_text("changed")
            Path("closed/deep").mkdir(parents=True)
            Path("closed").chmod(0)
            Path("link").symlink_to(kept_closed)
            lines = Path("/proc/self/mountinfo").read_text().splitlines()
            os.write(writer, sum(" - overlay " in it for it in lines).to_bytes())
            time.sleep(60)
        os._exit(1)
    os.close(writer)
    overlays = before.count(" - overlay ")
    assert os.read(reader, 1)[0] == overlays + 3, "the overlays are there while it runs"
    os.close(reader)
    assert Path("/proc/self/mountinfo").read_text() == before
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert Path("/proc/self/mountinfo").read_text() == before
    left = [stat.S_IMODE(it.stat().st_mode) for it in place.scratch.rglob("work/work")]
    assert 0 in left, "what makes it hard to remove is there"

    def removed() -> None:
        place.become()
        remove_whole(place.scratch)

    in_fork(removed)
    assert not place.scratch.exists()
    assert stat.S_IMODE(kept_closed.stat().st_mode) == 0o500
    assert (kept_closed / "file").exists()


def test_remove_takes_only_a_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "closed").mkdir(0)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(NotADirectoryError):
        remove_whole(tmp_path / "link")
    assert stat.S_IMODE((tmp_path / "real" / "closed").stat().st_mode) == 0
    remove_whole(tmp_path / "real")
    remove_whole(tmp_path / "none")
    assert names(tmp_path) == ["link"]


def unfit_link(scratch: Path) -> None:
    scratch.rmdir()
    (scratch.parent / "real").mkdir(0o700)
    scratch.symlink_to("real")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (unfit_link, "not a folder"),
        (lambda it: it.chmod(0o710), "open to other users"),
        (lambda it: (it / "x").touch(), "not empty"),
        (lambda it: it.rmdir(), "No such file"),
    ],
)
def test_an_unfit_scratch_folder_is_refused(
    place: Place, change: Callable[[Path], object], why: str
) -> None:
    def isolated() -> Any:
        place.become()
        change(place.scratch)
        try:
            place.isolate()
        except CannotIsolate as error:
            (place.cwd / "real").touch()
            return str(error)

    assert why in in_fork(isolated)
    assert (place.cwd / "real").exists(), "nothing was changed"


def test_a_scratch_folder_of_another_user_is_refused(of_root: Place) -> None:
    os.chown(of_root.scratch, NOBODY, NOBODY)
    with pytest.raises(CannotIsolate, match="open to other users"):
        of_root.run(lambda: None)


def test_a_folder_to_keep_must_exist(place: Place) -> None:
    place.kept.rmdir()
    with pytest.raises(CannotIsolate, match="kept"):
        place.run(lambda: None)


def test_another_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(CannotIsolate, match="Linux"):
        in_fork(lambda: isolate(tmp_path, [], []))


def test_a_process_with_threads_is_refused(place: Place) -> None:
    def isolated() -> None:
        place.become()
        threading.Thread(target=time.sleep, args=[60], daemon=True).start()
        place.isolate()

    with pytest.raises(CannotIsolate, match="threads"):
        in_fork(isolated)


def mounted(*places: tuple[Path, int]) -> None:
    """Enter a mount namespace, and mount an empty file system at each place."""
    libc("unshare", NEWNS)
    libc("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    for at, flags in places:
        at.mkdir(parents=True, exist_ok=True)
        libc("mount", b"t", os.fsencode(at), b"tmpfs", 0, b"mode=777")
        (at / "old").write_text("old")
        (at / "old").chmod(0o666)
        if flags:
            libc("mount", b"t", os.fsencode(at), None, flags | MS_REMOUNT, None)


def test_file_systems_mounted_beneath_are_covered_too(of_root: Place) -> None:
    place = of_root
    writable, read_only, within = place.cwd / "a b", place.cwd / "ro", place.cwd / "a b" / "in"

    def script() -> Any:
        (writable / "new").touch()
        (writable / "old").write_text("changed")
        (within / "new").touch()
        assert names(read_only) == ["old"]
        assert has(errno.EROFS, (read_only / "new").touch)
        (place.cwd / "new").touch()
        return names(writable)

    def outer() -> Any:
        mounted((writable, 0), (read_only, MS_RDONLY), (within, 0))
        inside = place.run(script)
        return (
            inside,
            names(writable),
            (writable / "old").read_text(),
            names(within),
        )

    inside, left, text, left_within = in_fork(outer)
    assert inside == ["in", "new", "old"]
    assert (left, text, left_within) == (["in", "old"], "old", ["old"])


def test_folders_to_keep_beneath_another_mount(of_root: Place) -> None:
    place = of_root

    def outer() -> Any:
        mounted((place.cwd / "vol", 0))
        kept = place.cwd / "vol" / "kept"
        kept.mkdir()

        def isolated() -> None:
            place.become()
            isolate(place.scratch, [kept], place.folders)
            (kept / "real").touch()
            (kept.parent / "new").touch()

        in_fork(isolated)
        return names(kept), names(kept.parent)

    assert in_fork(outer) == [["real"], ["kept", "old"]]


def test_its_parent_sees_and_ends_it_as_before(place: Place) -> None:
    def outer() -> Any:
        place.become()
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            with suppress(BaseException):
                place.isolate()
                os.write(writer, b"x")
                time.sleep(60)
            os._exit(1)
        os.read(reader, 1)
        own = Path(f"/proc/{pid}")
        seen = (str((own / "cwd").readlink()), len((own / "environ").read_bytes()) > 0)
        fds = names(own / "fd")
        os.kill(pid, signal.SIGTERM)
        return seen, len(fds) > 2, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert in_fork(outer) == [[str(place.cwd), True], True, -signal.SIGTERM]


def test_shared_mounts_outside_stay_as_they_are(of_root: Place) -> None:
    def outer() -> Any:
        mounted((of_root.home, 0))
        libc("mount", b"none", b"/", None, MS_REC | MS_SHARED, None)
        before = Path("/proc/self/mountinfo").read_text()
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            with suppress(BaseException):
                of_root.become()
                of_root.isolate()
                os.write(writer, b"x")
                time.sleep(60)
            os._exit(1)
        os.close(writer)
        isolated = os.read(reader, 1) == b"x"
        after = Path("/proc/self/mountinfo").read_text()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return isolated, after == before

    assert in_fork(outer) == [True, True]


def test_a_cover_forbids_what_its_folder_does(of_root: Place) -> None:
    program = of_root.cwd / "vol" / "program"

    def script() -> bool:
        shutil.copy("/bin/true", program)
        return has(errno.EACCES, lambda: subprocess.run([program]))

    def outer() -> Any:
        mounted((program.parent, MS_NOEXEC))
        return of_root.run(script)

    assert in_fork(outer)


def needs_root_to_mount() -> None:
    if os.geteuid():
        pytest.skip("only root can mount what another user can't take off")


def test_a_home_with_a_mount_is_covered_in_parts_without_roots_rights(of_user: Place) -> None:
    needs_root_to_mount()
    place = of_user

    def script() -> Any:
        (place.home / "folder" / "new").touch()
        (place.home / "drive" / "new").touch()
        assert has(errno.EROFS, (place.home / "new").touch)
        return names(place.home / "drive")

    def outer() -> Any:
        mounted((place.home / "drive", 0))
        return place.run(script), names(place.home / "drive")

    assert in_fork(outer) == [["new", "old"], ["old"]]
    assert names(place.home / "folder") == ["file", "inner"]


def test_a_project_with_a_mount_is_refused_without_roots_rights(of_user: Place) -> None:
    needs_root_to_mount()

    def outer() -> Any:
        mounted((of_user.cwd / "drive", 0))
        return of_user.run(lambda: None)

    with pytest.raises(CannotIsolate, match=r"working directory .*project can't be covered"):
        in_fork(outer)


def test_the_root_folder_is_covered_in_parts(place: Place) -> None:
    def isolated() -> Any:
        place.become()
        covered = isolate(place.scratch, [place.kept], [Path("/")])
        (place.elsewhere / "new").touch()
        (place.kept / "real").touch()
        Path("/dev/null").write_text("x")
        # Another user may not write there anyway; which error comes first depends on the kernel.
        assert place.who == "user" or has(errno.EROFS, Path("/new").touch)
        subprocess.run(["true"], check=True)
        return covered

    covered = in_fork(isolated)
    assert "/usr" in covered
    assert not {"/", "/proc", "/dev", "/sys"} & set(covered)
    assert not (place.elsewhere / "new").exists()
    assert (place.kept / "real").exists()


def test_a_file_system_that_cant_hold_what_is_written_is_named(of_root: Place) -> None:
    place = of_root
    lower, upper, work, merged = (place.elsewhere / it for it in ("l", "u", "w", "m"))

    def outer() -> Any:
        mounted()
        for it in (lower, upper, work, merged):
            it.mkdir(0o700)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}".encode()
        libc("mount", b"overlay", os.fsencode(merged), b"overlay", 0, options)
        (merged / "scratch").mkdir(0o700)
        os.chdir(place.cwd)
        isolate(merged / "scratch", [], place.folders)

    with pytest.raises(CannotIsolate, match="scratch on overlay can't be the upper layer"):
        in_fork(outer)


def test_the_switch_that_is_off_is_named(of_user: Place) -> None:
    def outer() -> Any:
        of_user.become()
        user, group = os.geteuid(), os.getegid()
        libc("unshare", NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc("capset", header, none)
        of_user.isolate()

    with pytest.raises(CannotIsolate, match=r"switched off \(user.max_user_namespaces is 0\)"):
        in_fork(outer)
