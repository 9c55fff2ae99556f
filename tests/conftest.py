"""Starts the real fasttrain for any test, and fails a test that leaves something behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadFileScheduling

from support import later
from support.command import Command, Terminal, clean_environ
from support.session import SlurmTogether, table_lines

# torch sets variables and keeps compile workers for the rest of the process that imported it.
_TORCHS_OWN = re.compile(r"_?TORCH|TRITON|KMP_|KINETO|PYTEST_CURRENT_TEST")
_HELPERS = re.compile(r"torch/_inductor|multiprocessing[./](resource_tracker|forkserver)")
PATIENCE_S = 120.0
_SETTLE_S = 20.0  # for a thread or process that is about to end

# A shell ignores SIGINT in what it starts in the background, and nohup SIGHUP; so would all that is
# started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run tests of a GPU in one process: two would share its memory and spoil their times."""
    if config.option.markexpr == "gpu":
        config.option.numprocesses, config.option.dist = 0, "no"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Keep the tests on SLURM together, unless another way of dealing was asked for."""
    return SlurmTogether(config, log) if config.getvalue("dist") == "loadfile" else None


# Longest first, so that no process is left alone with one of them at the end.
LONGEST = (
    "tests/slurm/", "tests/e2e/", "tests/contract/test_scripts.py", "tests/contract/test_frame",
    "tests/contract/test_checkpoints.py", "tests/contract/test_ranks_styles.py",
    "tests/contract/test_preempt_snapshots.py", "tests/contract/test_data_parallel",
    "tests/integration/", "tests/contract/", "tests/fuzz/", "tests/component/", "tests/unit/",
    "tests/faults/",  # these are dealt one by one
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is left to later, and put what takes longest first."""
    later.mark(items)

    def place(item: pytest.Item) -> int:
        names = (at for at, name in enumerate(LONGEST) if item.nodeid.startswith(name))
        return next(names, len(LONGEST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Keep all that is there by now out of the garbage collector's way; tests collect a lot."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def terminal(tmp_path: Path) -> Callable[..., Terminal]:
    """Start a command on a terminal of its own."""

    def start(argv: list[str], environ: dict[str, str] | None = None) -> Terminal:
        return Terminal(argv, tmp_path, environ or {**clean_environ(), "TERM": "xterm"})

    return start


@pytest.fixture
def fasttrain(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture(scope="session")
def environ() -> dict[str, str]:
    """The environment of what is started here."""
    return clean_environ()


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Write a script into the test's directory and give its path."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Wait until a condition holds."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.05)

    return wait


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    environ, threads, children = dict(os.environ), set(threading.enumerate()), _children()
    yield
    changed = {
        name
        for name in environ.keys() | os.environ.keys()
        if environ.get(name) != os.environ.get(name) and not _TORCHS_OWN.match(name)
    }
    assert not changed, f"environment variables were left changed: {sorted(changed)}"
    left = _remaining(lambda: [t for t in set(threading.enumerate()) - threads if not _torchs(t)])
    assert not left, f"threads were left running: {left}"
    left = _remaining(lambda: [_told(child) for child in _children() - children])
    assert not [text for text in left if text], f"processes were left running: {left}"


def _children() -> set[int]:
    """Return the process IDs of this process's children.

    Every test asks twice, and psutil reads the files of all processes to answer.
    """
    try:
        tasks = Path("/proc/self/task").iterdir()
        return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    except OSError:  # a thread that has just ended, or a kernel without these files
        return {child.pid for child in psutil.Process().children()}


def _torchs(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    # inductor shows its progress by tqdm, whose monitor lives on, where that is installed
    modules = (type(thread).__module__, str(getattr(target, "__module__", "")))
    return any(name.startswith(("torch", "tqdm")) for name in modules)


def _told(child: int) -> str:
    """Return what to call a left process by; nothing for helpers that live on by design."""
    try:
        command = " ".join(psutil.Process(child).cmdline())
        return "" if _HELPERS.search(command) else command or f"zombie {child}"
    except psutil.NoSuchProcess:
        return ""


def _remaining(look: Any) -> list[Any]:
    deadline = time.monotonic() + _SETTLE_S
    while any(found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return list(found)


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], Callable[[], None]]]:
    """Return what puts a process into a control group of its own of so many bytes without swap.

    Where no such group can be made, the test is skipped.
    """
    own = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = {names: path for _, names, path in own}
    if "memory" in paths:
        root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes",)
    else:
        root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.swap.max")
    above = Path(f"{root}{paths.get('memory', paths.get('', '/'))}")
    made: list[Path] = []

    def make(limit_bytes: int) -> Callable[[], None]:
        group = above / f"fasttrain-{os.getpid()}-{len(made)}"
        made.append(group)
        try:
            group.mkdir()
            for name, value in zip(names, (limit_bytes, 0), strict=False):
                (group / name).write_text(str(value))
        except OSError as error:
            pytest.skip(f"no control group with a limit of memory can be made: {error}")
        return lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None

    yield make
    for group in filter(Path.exists, made):
        group.rmdir()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the rounds of the tests of faults be chosen."""
    parser.addoption(
        "--rounds", choices=("few", "full"),
        help="of random kills, staggered crashes and the like: full with -m faults alone, else few",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Decide on the rounds."""
    asked_alone = config.option.markexpr == "faults"
    config.option.rounds = config.option.rounds or ("full" if asked_alone else "few")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the tables of the tests of faults, if these were asked for."""
    if config.option.markexpr != "faults":
        return
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "table" and report.when == "call"
    ]
    # Here, and not in the folder's own conftest.py, which the process that prints never loads.
    for line in table_lines(rows):
        terminalreporter.write_line(line)
