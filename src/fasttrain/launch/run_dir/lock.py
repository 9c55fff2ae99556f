"""Claims a run directory for one run: private to the user, locked while the launcher lives."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from fasttrain.files import (
    Danger,
    doubts,
    give_back,
    is_open,
    load,
    refused,
    refused_folder,
    refused_way,
    write_private,
)
from fasttrain.model.attempts import DIVIDER, ResumeMode, attempt_folder
from fasttrain.model.codec import CodecError
from fasttrain.model.crash import CRASH_FILE, EXITS_FILE
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.hang import HANG_FILE
from fasttrain.model.job import JOB_FILE
from fasttrain.model.outcome import RECEIPT_FILE, Receipt
from fasttrain.model.places import LOCK_FILE, RUNS_FOLDER
from fasttrain.model.plan import PLAN_FILE

# Puts the records of a failed attempt aside, and marks its end in the logs.


_LINE = re.compile(rf"^{DIVIDER}.*\n?", re.MULTILINE)
# Files that ranks and launcher write about one attempt; whatever else is there is the script's.
RECORDS = (
    "failure-*.json", "fault-*.txt", "rank-*.json", "events-*.jsonl", "heartbeat-*.json",
    "stacks-*.txt", CRASH_FILE, HANG_FILE, RECEIPT_FILE, EXITS_FILE,
)  # fmt: skip

# Files that their writers have reserved room for.
_RESERVED = ("failure-*.json", EXITS_FILE)


def give_all_back(run_dir: Path) -> None:
    """Free the room that processes reserved for records which they did not write."""
    for path in (path for name in _RESERVED for path in run_dir.glob(f"{name}.tmp")):
        give_back(path.with_suffix(""))


def put_aside(run_dir: Path, number: int) -> str:
    """Move the records of an attempt into a folder, and return its name; empty without records.

    A job that SLURM queued again counts its attempts from 1 again; the next free name is taken.

    Raises:
        OSError: The disk is full, or the run directory is lost.
    """
    paths = [path for pattern in RECORDS for path in run_dir.glob(pattern)]
    if not paths:
        return ""
    names = (attempt_folder(one) for one in count(number))
    name = next(name for name in names if not (run_dir / name).exists())
    (run_dir / name).mkdir(mode=0o700)
    for path in paths:
        path.replace(run_dir / name / path.name)
    return name


def divide_logs(run_dir: Path, told: str) -> None:
    """Write a line into each rank's log that marks the end of an attempt.

    Raises:
        OSError: The disk is full, or the run directory is lost.
    """
    for path in run_dir.glob("rank-*.log"):
        with path.open("a+b") as log:
            log.seek(max(0, log.tell() - 1))
            begun = log.read() not in (b"", b"\n")
            log.write(b"\n" * begun + f"{DIVIDER}{told} ---\n".encode())


def of_last_attempt(text: str) -> str:
    """Return the part of a log that the last attempt wrote."""
    *_, last = _LINE.split(text)
    return last


# Claims a run directory for one run: private to the user, locked while the launcher lives.


ENDED_WELL = "the run had ended well"
PARENTS_MODE = 0o775  # cut down by the umask; never open to everybody
OF_A_RUN = {PLAN_FILE, JOB_FILE, RECEIPT_FILE, CRASH_FILE, EXITS_FILE, HANG_FILE}
_OF_A_RANK = re.compile(r"(rank|events|failure|fault|heartbeat|stacks)-\d+\..+")
# A file system without locks, or an NFS server whose lock service doesn't run.
# Source: flock(2), fcntl(2), nfs(5)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EIO)


@dataclass(frozen=True, slots=True)
class Claim:
    """A run directory that is this run's own.

    Attributes:
        path: Where it is.
        warnings: What is doubtful about it, one sentence each.
    """

    path: Path
    warnings: tuple[str, ...] = ()


@contextmanager
def claim(named: str, resume: ResumeMode = "no") -> Iterator[Claim]:
    """Make a run directory and lock it against other launchers.

    If a run is resumed in it, the records of the previous attempt are put aside first.

    Args:
        named: The directory.
        resume: Whether the run that is in it is resumed.

    Raises:
        FasttrainError: ``run-dir`` where it can't be made, ``run-dir-unsafe`` where others could
            write to it, ``run-dir-busy`` and ``run-dir-used`` where it is another run's,
            ``resume-missing`` where it holds no run to resume.
    """
    path = Path(named)
    with ExitStack() as held:
        try:
            begun = resume != "no" and (path / PLAN_FILE).exists()
            if resume == "required" and not begun:
                raise _nothing_begun(path)
            # A new directory may lie beside the script: who can change that gains nothing by it. A
            # resumed run loads what is in the directory, so all of its path must be safe.
            folder = open_private(path, beside=Path.cwd() if resume == "no" else None)
            held.callback(os.close, folder)
            if not begun and not (path / LOCK_FILE).exists():
                _check_unused(path, folder)  # before a lock file is left in another run's directory
            lock, problems = _locked(path)
            held.callback(os.close, lock)
            ended = _ended_well(path) if resume == "required" else ()
            if begun:
                put_aside(path, 1)
            else:
                _check_unused(path, folder)
            doubted = _doubted(path)
            _hide_from_git(path.parent)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte, which YAML can hold
            raise _impossible(path, error) from error
        yield Claim(path, (*doubted, *problems, *ended))


def make_run_dir(named: str, first_file: str, text: str) -> Path:
    """Make a run directory for a job, whose files are read once the job starts.

    Raises:
        FasttrainError: As `claim` and `check_private`, or the first file can't be written.
    """
    check_private(Path(named))
    with claim(named) as claimed:
        begin(claimed, first_file, text)
    return claimed.path


def begin(claimed: Claim, first_file: str, text: str) -> None:
    """Write the file that marks a run directory as used by a run.

    Raises:
        FasttrainError: ``run-dir`` where it can't be written.
    """
    try:
        write_private(claimed.path / first_file, text)
    except OSError as error:
        raise _impossible(claimed.path, error) from error


def open_private(path: Path, *, beside: Path | None = None) -> int:
    """Make a folder unless it exists, and return a descriptor of it once it is private.

    The check is of the folder that was opened, whatever its name refers to a moment later.

    Args:
        path: The folder.
        beside: See `refused_way`.

    Raises:
        FasttrainError: ``run-dir-unsafe`` where somebody else can write to it.
        OSError: It can't be made or opened.
    """
    if danger := refused_way(path, beside):
        raise _unsafe(path, danger)
    for parent in reversed(path.parents):
        if not parent.is_dir():
            parent.mkdir(PARENTS_MODE, exist_ok=True)
    made = False
    with suppress(FileExistsError):
        path.mkdir(0o700)
        made = True
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(os.path.realpath(path), flags)
    try:
        danger = refused_folder(path, os.fstat(folder))
        # A file system without modes (FAT, NTFS, Windows' disks under WSL) shows what it was told
        # to: where it lies beside the script, whoever can write there could change that anyway.
        if danger and not (made and beside and is_open(beside)):
            raise _unsafe(path, danger)
        if not danger:
            os.fchmod(folder, 0o700)  # an existing one may be readable for others
    except BaseException:
        os.close(folder)
        raise
    return folder


def check_private(path: Path) -> None:
    """Check that a run directory that was made before is still private to the user.

    Raises:
        FasttrainError: ``run-dir-unsafe`` where somebody else can write to it, ``run-dir`` where
            it can't be examined.
    """
    try:
        danger = refused(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        raise _impossible(path, error) from error
    if danger:
        raise _unsafe(path, danger)


def renew(path: Path, attempt: int) -> str:
    """Make the directory of a node's part of a run, and put the previous attempt's records aside.

    The logs of all attempts stay together.

    Args:
        path: The directory.
        attempt: How often the run was started before.

    Returns:
        The name of the folder in it with what was put aside; empty if there was nothing.

    Raises:
        FasttrainError: As `claim`, but for what is another run's.
    """
    try:
        os.close(open_private(path))
        aside = put_aside(path, attempt) if attempt else ""
        if aside and (path / PLAN_FILE).exists():  # this attempt may have other nodes
            (path / PLAN_FILE).replace(path / aside / PLAN_FILE)
        return aside
    except OSError as error:
        raise _impossible(path, error) from error


def _hide_from_git(folder: Path) -> None:
    """Write a .gitignore into the folder of runs, unless one exists, even an empty one."""
    if folder.name == RUNS_FOLDER:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(OSError):  # it exists, or the disk is full
            file = os.open(folder / ".gitignore", flags, 0o644)
            os.write(file, b"*\n")
            os.close(file)


def _doubted(path: Path) -> list[str]:
    return [
        f"{why}, and could put another directory in the place of the run's: name one elsewhere"
        " with --run-dir"
        for why in doubts(path, Path.cwd())
    ]


def _ended_well(path: Path) -> tuple[str, ...]:
    """Return a warning if the run that is resumed had ended well; empty otherwise."""
    try:
        receipt = load(Receipt, path / RECEIPT_FILE)
    except (OSError, CodecError):  # it wrote no receipt
        return ()
    if receipt.exit_code:
        return ()
    return (f"{ENDED_WELL}: what it trained after its last snapshot is trained again",)


def _check_unused(path: Path, folder: int) -> None:
    names = sorted(os.listdir(folder))
    used = next((name for name in names if name in OF_A_RUN or _OF_A_RANK.fullmatch(name)), "")
    if used:
        why = f"another run's {used} is in it"
        raise _refusal(path, why, "name a new directory", "run-dir-used")


def _locked(path: Path) -> tuple[int, tuple[str, ...]]:
    """Return a descriptor that holds the lock while it is open, and warnings.

    The kernel releases the lock when the launcher dies, however that happens.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(path / LOCK_FILE, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 1000).decode(errors="replace").strip()
        os.close(lock)
        why = f"a run is using it{f', of {holder}' if holder else ''}"
        raise _refusal(path, why, "wait for its end, or name another", "run-dir-busy") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(lock)
            raise
        return lock, (f"no other launcher is kept out of {path}: {error.strerror}",)
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock, ()


def _nothing_begun(path: Path) -> FasttrainError:
    return FasttrainError(
        f"there is no run to resume in {path}",
        why=f"it holds no {PLAN_FILE}",
        fix=f"name the directory of the run that was preempted, such as one in {RUNS_FOLDER}/",
        slug="resume-missing",
        exit_code=ExitCode.CANNOT_START,
    )


def _unsafe(path: Path, danger: Danger) -> FasttrainError:
    fix = f"{danger.mend} if all that is there is yours, or name another directory"
    return _refusal(path, danger.why, fix if danger.mend else "name another", "run-dir-unsafe")


def _impossible(path: Path, error: OSError | ValueError) -> FasttrainError:
    why = getattr(error, "strerror", None) or str(error)
    return _refusal(path, why, "name a directory that can be written", "run-dir")


def _refusal(path: Path, why: str, fix: str, slug: str) -> FasttrainError:
    return FasttrainError(
        f"the run directory {path} can't be used",
        why=why,
        fix=f"{fix} with --run-dir",
        slug=slug,
        exit_code=ExitCode.CANNOT_START,
    )
