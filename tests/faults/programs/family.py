"""Ranks with a family, without torch: each fails when one of its relatives is gone.

A rank has two children as workers of a DataLoader are, a grandchild in a session of its own, and
one that has lost its parent.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

rank = os.environ.get("RANK", "0")
SLEEP = "import os, sys, time; open(f'pid-{sys.argv[1]}-{os.getpid()}', 'w'); time.sleep(60)"
DETACH = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])"


def load():
    subprocess.Popen([sys.executable, "-Sc", SLEEP, rank], start_new_session=True)
    time.sleep(60)


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    loaders = [
        multiprocessing.get_context("fork").Process(target=load, daemon=True) for _ in range(2)
    ]
    [loader.start() for loader in loaders]
    subprocess.run([sys.executable, "-Sc", DETACH, SLEEP, rank])

    def found():
        return [path.name.split("-")[2] for path in Path().glob(f"pid-{rank}-*")]

    while len(found()) < 3:
        time.sleep(0.01)
    relatives = [*found(), *(loader.pid for loader in loaders)]
    Path(f"ready-{rank}").touch()
    while all(map(lives, relatives)):
        time.sleep(0.01)
    os._exit(1)
