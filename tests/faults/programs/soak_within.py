"""Has one process start runs one after another, and counts behind each what it holds itself.

``python soak_within.py RUNS PLAN``: a plan of a short script; the counts go to stdout, a line of
JSON for each run: descriptors, threads, handlers of signals, held signals, children.
"""

# ruff: noqa: T201

import json
import os
import signal
import sys
import threading
from pathlib import Path

from fasttrain.launch.node_run import Observers
from fasttrain.launch.output.display import QuietDisplay
from fasttrain.launch.start import start
from fasttrain.model.codec import loads
from fasttrain.model.plan import LaunchPlan


def entries(folder):
    return len(list(Path(folder).iterdir()))


def counts():
    return {
        "descriptors": entries("/proc/self/fd"),
        "threads": threading.active_count(),
        "tasks": entries("/proc/self/task"),
        "handlers": sum(
            signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN)
            for number in signal.valid_signals()
        ),
        "held signals": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
    }


if __name__ == "__main__":
    text = Path(sys.argv[2]).read_text()
    model = loads(LaunchPlan, text).run_dir
    for number in range(int(sys.argv[1])):
        plan = loads(LaunchPlan, text.replace(model, f"{model}-{number}"))
        receipt = start(plan, plan, os.environ, Observers(QuietDisplay()))
        assert receipt.exit_code == 5, receipt
        print(json.dumps(counts()), flush=True)
