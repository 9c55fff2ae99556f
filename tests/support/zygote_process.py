"""A process that has imported torch and forks for each job: ``python zygote_process.py``.

Importing torch costs 20 times what a small script itself does. Each line of stdin is a job in JSON,
as `support.zygote` writes it, and each line of stdout ``[job, exit code]`` of one that has ended.

A fork is as a new process would be: working directory, environment, arguments, streams,
``__main__``, random numbers and exit code are its own, and one that runs a script as ``python``
would has no module of fasttrain. What is given up: torch, dynamo and the shim are in before the
script imports torch, so that the levers are installed before the script's first line and not at its
import of torch; all forks have one seed of hashes; the garbage collector leaves alone what was
there before; and they end after their threads, exit handlers and streams, without taking torch's
modules down, which costs a second.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import runpy
import selectors
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch._dynamo  # the first step of any optimizer imports it, in one second and a half

from fasttrain.shim import runtime, worker  # noqa: F401 - what takes the time

Job = dict[str, Any]


class Forks:
    """The forks that run, each known by a descriptor that becomes readable when it has ended."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self._jobs: dict[int, tuple[int, Job]] = {}  # process id and job, by descriptor

    def start(self, job: Job) -> bool:
        """Fork; return True in the child."""
        if not (pid := os.fork()):
            self.selector.close()
            for descriptor in self._jobs:
                os.close(descriptor)
            return True
        descriptor = os.pidfd_open(pid)
        job["until"] = time.monotonic() + job["timeout_s"]
        self._jobs[descriptor] = pid, job
        self.selector.register(descriptor, selectors.EVENT_READ)
        return False

    def ended(self, descriptor: int) -> None:
        """Report the exit code of a fork, and end those that can't go on without it."""
        pid, job = self._jobs.pop(descriptor)
        self.selector.unregister(descriptor)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{json.dumps([job['id'], code])}\n")
        sys.stdout.flush()
        if group := job["group"]:
            left = [(pid, each) for pid, each in self._jobs.values() if each["group"] == group]
            if code or all(each["kind"] == "store" for _, each in left):
                for pid, _ in left:
                    os.kill(pid, signal.SIGKILL)

    def end_late_ones(self) -> None:
        """End those that have taken longer than they may."""
        for pid, job in self._jobs.values():
            if job["until"] < time.monotonic():
                os.kill(pid, signal.SIGKILL)


def take() -> Job | None:
    """Fork for each job, and return it in the child; return None at the end of the jobs."""
    forks, rest = Forks(), b""
    while True:
        for key, _ in forks.selector.select(1.0):
            if key.fd:
                forks.ended(key.fd)
                continue
            if not (data := os.read(0, 1 << 16)):
                return None
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                job = json.loads(line)
                if forks.start(job):
                    return dict(job)
        forks.end_late_ones()


def become(job: Job) -> None:
    """Take a job's directory, environment and streams, and random numbers of this fork's own."""
    os.environ.clear()
    os.environ.update(job["environ"])
    os.chdir(job["cwd"])
    sys.stdin.close()
    where = {0: ("stdin", os.devnull), 1: ("stdout", job["stdout"]), 2: ("stderr", job["stderr"])}
    for descriptor, (name, path) in where.items():
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
        stream = _stream(descriptor, name)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # Python's own random numbers begin again in every fork; these would be the same in all.
    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _stream(descriptor: int, name: str) -> io.TextIOWrapper:
    """Return a stream with the buffers that the interpreter gives one that is a file."""
    raw = io.FileIO(descriptor, "w" if descriptor else "r", closefd=False)
    raw.name = f"<{name}>"
    buffered = io.BufferedWriter(raw) if descriptor else io.BufferedReader(raw)
    errors = "backslashreplace" if name == "stderr" else "strict"
    stream = io.TextIOWrapper(
        buffered, encoding="utf-8", errors=errors, line_buffering=name == "stderr"
    )
    vars(stream)["mode"] = raw.mode[:1]  # as the interpreter does
    return stream


def run(job: Job) -> None:
    """Run a script as ``python`` or a worker of fasttrain would, or keep the store of ranks."""
    become(job)
    for path, function, *args in job["prepare"]:
        runpy.run_path(path)[function](*args)
    if job["kind"] == "store":
        keep_store(Path(job["script"]))
    elif job["kind"] == "worker":
        vars(worker)["after_torch"] = lambda install: install()  # it is imported already
        worker.main([job["plan"], "script", job["script"], *job["args"]])
    else:
        as_python(job["script"], job["args"])


def keep_store(path: Path) -> NoReturn:
    """Keep the store by which ranks meet, as torchrun's agent does; its port goes into a file."""
    zygote = os.getppid()
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    draft = path.with_suffix(".draft")
    draft.write_text(str(store.port))
    draft.rename(path)
    while os.getppid() == zygote:  # which kills it, unless it is killed itself
        time.sleep(1)
    os._exit(0)


def as_python(script: str, args: list[str]) -> None:
    """Run a script where no trace of fasttrain is."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fasttrain"]:
        del sys.modules[name]
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), vars(module))


def run_to_the_end(job: Job) -> NoReturn:
    """Run a job, and end this process as the interpreter would."""
    code = 1
    try:
        run(job)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - what the interpreter does with it
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    """Fork until there are no more jobs."""
    del sys.path[0]  # this folder is none of the scripts'
    torch.set_num_threads(1)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "a fork has none of the threads of its parent"
    gc.collect()
    gc.freeze()  # so that the memory of all this stays shared
    if (job := take()) is not None:
        run_to_the_end(job)
    os._exit(0)  # taking torch down costs a second here, too


if __name__ == "__main__":
    main()
