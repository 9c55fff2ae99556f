"""Real fasttrain processes with hostile words, variables and files, and real workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import psutil
import pytest
from hypothesis import assume, given

import fasttrain
from support.fuzz.ground import NAMES, problems
from support.fuzz.records import sound, spoiled
from support.fuzz.words import ENVIRONS, HOSTILE, LETTERS, LINES, NUMBERS

SHIM = str(Path(fasttrain.__file__).parent / "shim" / "__main__.py")
LIMIT_S = 60.0  # many times what any of them takes: this machine may be busy
SETTLE_S = 20.0
# What Python itself reads, beside what the command lines in this process are tried with.
PYTHONS = st.dictionaries(
    st.sampled_from(
        ["PYTHONWARNINGS", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONCOERCECLOCALE", "LANG",
         "LC_ALL", "PYTHONHASHSEED", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "PYTHONOPTIMIZE",
         "COLUMNS",
         "PYTHONSAFEPATH", "PYTHONDEVMODE", "FORCE_COLOR", "TERM"]
    ),
    st.sampled_from(["", "0", "1", "C", "ascii", "utf-8:strict", "xx_XX.xx", "error", "\udcff"]),
    max_size=3,
)  # fmt: skip
# Python refuses to start with these itself.
NOT_STARTED = (b"Fatal Python error", b"LookupError: unknown encoding")


class Real:
    """Starts real processes in the private place, and judges how they end."""

    def __init__(self, ground: Any) -> None:
        self._ground = ground
        self._number = 0

    def __call__(
        self, argv: list[str], environ: dict[str, str], place: str = "work"
    ) -> tuple[int, str, str, list[str]]:
        """Return exit code, stdout, stderr and what is wrong."""
        self._number += 1
        mark = f"fuzz-{os.getpid()}-{self._number}"
        folder = self._ground.root / place
        before = self._ground.look()
        process = subprocess.Popen(
            [sys.executable, *argv], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**self._ground.environ(), **environ, "FUZZ_MARK": mark},
            start_new_session=True,
        )  # fmt: skip
        found = []
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            found.append(f"it took more than {LIMIT_S:.0f} s")
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        found += [f"left behind: {one}" for one in _left(mark)]
        found += [f"written: {path}" for path in self._ground.stray(before)]
        texts = [stream.decode(errors="surrogateescape") for stream in (out, err)]
        return process.returncode, *texts, found


def _left(mark: str) -> Iterator[str]:
    """Return the processes that still carry a mark a moment later, and end them."""
    deadline_s = time.monotonic() + SETTLE_S
    while (left := _marked(mark)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for process in left:
        yield str(process)
        process.kill()


def _marked(mark: str) -> list[psutil.Process]:
    entry = f"FUZZ_MARK={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if entry in path.read_bytes().split(b"\0"):
                found.append(psutil.Process(int(path.parent.name)))
        except (OSError, psutil.Error):  # it has ended just now
            continue
    return found


@pytest.fixture
def real(ground: Any) -> Real:
    return Real(ground)


# They could end what others run on this machine (see support/fuzz/seams.py), measure it for a
# minute, start more processes than it has room for, or wait for nodes that never come.
NOT_FOR_REAL = re.compile(
    r"kill|--(f|b|n|gpus|rd|max-r)|FASTTRAIN_(SLURM_)?(N|GPUS|RDZV|MAX_R)", re.IGNORECASE
)


def harmless(words: Iterable[str]) -> bool:
    """Whether a line may really be run."""
    return not any(map(NOT_FOR_REAL.match, words))


def test_processes(real: Real, rounds: Any, figures: Counter[int]) -> None:
    @rounds(10, 200)
    @given(LINES, ENVIRONS, PYTHONS)
    def check(words: list[str], environ: dict[str, str], pythons: dict[str, str]) -> None:
        # Not by a filter, which hypothesis describes in megabytes whenever it refuses a line.
        assume(harmless((*words, *environ)))
        code, out, err, found = real(["-m", "fasttrain", *words], {**environ, **pythons})
        figures[code] += 1
        if not any(text.decode() in err for text in NOT_STARTED):
            # A real script was started unless there is no run directory; its ends are its own.
            found += problems(code, out, err, started="kept in " in err)
        assert not found, f"{words}\n{environ}\n{pythons}\n{code}\n{out}\n{err}\n{found}"

    check()


def test_workers(real: Real, rounds: Any, figures: Counter[int], ground: Any) -> None:
    plan = {**sound()["plan.json"], "run_dir": "."}
    path = ground.work / "plan.json"
    numbers = st.sampled_from(NUMBERS)
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "FASTTRAIN_RESTART_COUNT",
    )

    @rounds(10, 200)
    @given(spoiled(plan), st.dictionaries(st.sampled_from(names), numbers, max_size=4))
    def check(content: bytes, environ: dict[str, str]) -> None:
        path.write_bytes(content)
        code, out, err, found = real([SHIM, "plan.json", "script", "train.py", "a b"], environ)
        path.unlink()
        figures[code] += 1
        found += problems(code, out, err)
        assert not found, f"{content!r}\n{environ}\n{code}\n{out}\n{err}\n{found}"

    check()


ARGUMENT = st.text(LETTERS, max_size=8) | st.sampled_from((*HOSTILE, *NUMBERS))


def test_arguments_arrive_byte_for_byte(real: Real, rounds: Any, ground: Any) -> None:
    """What stands behind -- reaches the script as it was typed, whatever the script is called."""
    shows = "import os, sys\nprint(*(os.fsencode(word).hex() for word in sys.argv), sep=',')\n"

    @rounds(6, 60)
    @given(st.sampled_from(NAMES), st.lists(ARGUMENT, max_size=5))
    def check(name: str, args: list[str]) -> None:
        before = (ground.work / name).read_bytes()
        (ground.work / name).write_text(shows)
        try:
            code, out, err, found = real(["-m", "fasttrain", "run", f"./{name}", "--", *args], {})
        finally:
            (ground.work / name).write_bytes(before)
        sent = ",".join(os.fsencode(word).hex() for word in (f"./{name}", *args))
        assert (code, out, found) == (0, f"{sent}\n", []), err

    check()
