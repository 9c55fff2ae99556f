"""A private place for hostile input, and what must be true of it after every command line."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from fasttrain.model.errors import ExitCode
from fasttrain.model.job import JOB_FILE, SUBMITTED_FILE
from fasttrain.model.places import RUNS_FOLDER
from fasttrain.model.plan import PLAN_FILE

# What makes a folder a run directory, or what `fasttrain init` has made.
OWNED = (PLAN_FILE, JOB_FILE, SUBMITTED_FILE, "char_lm.py")
# At the beginning of a line: one that a card or JSON quotes from a log is the script's.
TRACEBACK = re.compile(r"^Traceback \(most recent call last\)", re.MULTILINE)
DOCUMENTED = set(ExitCode) - {ExitCode.BUG} | {0}
REFUSED = {ExitCode.USAGE, ExitCode.UNAVAILABLE, ExitCode.CANNOT_START, ExitCode.CONTRADICTION}
THREE_LINES = re.compile(r"error: .*\n  why: .*\n  fix: .* {8}\[[a-z0-9-]+\]\n")
TOOLS = ("sbatch", "srun", "squeue", "sacct", "scancel", "sinfo", "scontrol", "nvidia-smi")
# What may stand beside an error: what fasttrain did before, and a word of Python's own.
BESIDE = ("fasttrain: ", "Invalid -W option")
SCRIPT = "import sys\n"
# Names as disks and mistakes make them: each is a file of the working directory.
NAMES = (
    "spa ce.py", "new\nline.py", "--odd.py", "q'uo\"te;$(touch started).py", os.fsdecode(b"\xff.py")
)  # fmt: skip
FOLDERS = ("home", "tmp", "bin", "work", "work/folder", os.fsdecode(b"work/caf\xe9\n[b]"))
MACHINES = Path(__file__).parents[2] / "data" / "machines"


class Ground:
    """A home, a folder for temporary files, tools and a working directory, watched as a whole.

    Attributes:
        root: All of it.
        work: The working directory, with scripts, configurations, a pipe, links and folders.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / "work"
        for name in FOLDERS:
            (root / name).mkdir()
        for name, machine in (("machine", "cpu-laptop"), ("gpus", "4xt4")):
            shutil.copy(MACHINES / f"{machine}.json", root / f"{name}.json")
        for name in TOOLS:
            (root / "bin" / name).symlink_to("/bin/true")
        for name in ("train.py", *NAMES, "pkg.py"):
            (self.work / name).write_text(SCRIPT)
        (self.work / "bad.py").write_text("def f(:\n")
        (self.work / "binary.py").write_bytes(b"\x7fELF\0\xff")
        (self.work / "good.yaml").write_text("amp: off\n")
        (self.work / "bad.yaml").write_text("amp: {\n")
        os.mkfifo(self.work / "fifo")
        (self.work / "loop").symlink_to("loop")
        (self.work / "dangling").symlink_to("nowhere")
        (self.work / "closed.py").write_text("")
        (self.work / "closed.py").chmod(0)

    def environ(self) -> dict[str, str]:
        """Return an environment in which nothing lies outside of this place but the programs."""
        return {
            "HOME": str(self.root / "home"),
            "TMPDIR": str(self.root / "tmp"),
            "PATH": f"{self.root / 'bin'}:{os.defpath}",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # beside a module of the user's, as python -m does
        }

    def look(self) -> dict[str, tuple[int, int, int]]:
        """Return all paths of this place, each with its kind, its size and when it was written."""
        found: dict[str, tuple[int, int, int]] = {}
        for folder, folders, files in os.walk(self.root):
            for name in (*folders, *files):
                path = os.path.join(folder, name)  # noqa: PTH118 - some thousands of times
                state = os.lstat(path)
                is_file = name in files
                kept = (state.st_size, state.st_mtime_ns) if is_file else (0, 0)
                found[path] = (state.st_mode >> 12, *kept)
        return found

    def stray(self, before: dict[str, tuple[int, int, int]]) -> list[str]:
        """Return what was written outside of run directories and the cache, and remove it."""
        now = self.look()
        owned = {str(Path(path).parent) for path in now if Path(path).name in OWNED}
        owned.add(str(self.root / "home" / ".cache" / "fasttrain"))  # for compiled kernels
        new = sorted(now.keys() - before.keys())
        changed = [path for path, state in before.items() if now.get(path) != state]
        for path in map(Path, reversed(new)):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        return [path for path in (*new, *changed) if not _belongs(path, owned)]


def _belongs(path: str, owned: Iterable[str]) -> bool:
    """Whether a path is such a folder, in one, or a folder that was made on the way to one."""
    named = RUNS_FOLDER, f"{RUNS_FOLDER}/.gitignore"
    return path.endswith(tuple(f"/{name}" for name in named)) or any(
        path == folder or path.startswith(f"{folder}/") or folder.startswith(f"{path}/")
        for folder in owned
    )


def problems(code: int, out: str, err: str, *, started: bool = False) -> list[str]:
    """Return what is wrong with how a command line ended.

    Args:
        code: Its exit code.
        out: What it printed.
        err: What it said.
        started: Whether it has started anything, whose exit code passes through.
    """
    found = []
    if TRACEBACK.search(f"{out}\n{err}"):
        found.append("a traceback")
    if code not in DOCUMENTED and not (started and (code == 1 or 128 < code < 256)):
        found.append(f"exit code {code}, which is documented nowhere")
    lines = err.splitlines(keepends=True)
    told = "".join(line for line in lines if not line.startswith(BESIDE))
    if code in REFUSED and not out and not started and not THREE_LINES.fullmatch(told):
        found.append("refused, but not in three lines")
    return found
