"""Runs scripts in forks of one process that has imported torch: ``python zygote.py < jobs``.

Each line of stdin is one job in JSON, and each line of stdout the exit code of one; a job's own
streams go to files in its directory. Importing torch costs 20 times what such a script itself does.
What is given up: torch, dynamo and the shim are in before the script imports torch, so that the
levers are installed before the script's first line and not at its import of torch; and the process
ends after its threads, exit handlers and streams, without taking torch's modules down, which costs
a second. The rest is the worker's own entry, which reads the plan.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import by_hand
import torch
import torch._dynamo  # the first step of any optimizer imports it, in one second and a half

from fasttrain.shim import runtime, worker  # noqa: F401 - the runtime is what takes the time

torch.set_num_threads(1)


def take() -> dict[str, Any] | None:
    """Fork for each job, and return it in the child; return None at the end of the jobs."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    return None


def into_files(cwd: str) -> None:
    """Work in a job's directory, and send both streams to files there."""
    os.chdir(cwd)
    sys.stdin.close()
    for name, descriptor in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        file = os.open(os.devnull if name == "stdin" else name, os.O_RDWR | os.O_CREAT, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
        mode = "r" if name == "stdin" else "w"
        setattr(sys, name, io.TextIOWrapper(io.FileIO(descriptor, mode, closefd=False)))


def run(job: dict[str, Any]) -> None:
    """Run a script as ``python`` would, as its twin, or as a worker of fasttrain would."""
    into_files(job["cwd"])
    script: str = job["script"]
    if job.get("backend"):
        by_hand.compile_with(job["backend"])
    if job.get("plan"):
        vars(worker)["after_torch"] = lambda install: install()  # it is imported already
        worker.main([job["plan"], "script", script])
        return
    if job.get("autocast"):
        by_hand.autocast(getattr(torch, job["autocast"]))
    if job.get("scaled"):
        by_hand.scaled()
    if job.get("fused"):
        by_hand.fused()
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def run_to_the_end(job: dict[str, Any]) -> None:
    """Run a job, and end this process."""
    code = 1
    try:
        run(job)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what the interpreter does with it
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    del sys.path[0]  # this folder is none of the scripts'
    if (given := take()) is not None:
        run_to_the_end(given)
    os._exit(0)  # taking torch down costs a second here, too
