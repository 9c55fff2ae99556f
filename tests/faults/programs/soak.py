"""Starts short runs one after another, and counts behind each what could grow.

``python soak.py RUNS``, in a folder of its own; the counts go to stdout, a line of JSON for each
run: files in $TMPDIR, in the cache and in /dev/shm, sockets, semaphores, zombies, own descriptors.
"""

# ruff: noqa: T201

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TIME_WAIT = "06"  # of a connection that has ended; the kernel forgets it in a minute
SETTLE_S = 20.0
FINE = "import tempfile; tempfile.TemporaryFile().write(b'x')"
WAITS = "import time; open('ready', 'w').close(); time.sleep(60)"
TRAINS = """
import torch
model = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4, num_workers=1):
    model(x).sum().backward()
    sgd.step()
"""
# Most are as short as they can be; each tenth trains on two ranks with workers of a DataLoader.
KINDS = [
    ("two ranks", TRAINS, 0, ("--nproc-per-node", "2", "--device", "cpu")),
    *[("fine", FINE, 0, ()), ("fails", "{}['key']", 1, ()), ("ctrl-C", WAITS, 130, ())] * 3,
]


def run(number):
    name, text, expected, options = KINDS[number % len(KINDS)]
    Path("train.py").write_text(text)
    argv = [sys.executable, "-m", "fasttrain", "run", "train.py", "--quiet", *options]
    with Path("said").open("wb") as said:
        process = subprocess.Popen(argv, stdout=said, stderr=said)
    if name == "ctrl-C":
        while not Path("ready").exists():
            time.sleep(0.01)
        Path("ready").unlink()
        process.send_signal(signal.SIGINT)
    code = process.wait(200)
    assert code == expected, f"{name} ended with {code}: {Path('said').read_text()}"


def counts(runs):
    """Count all that is there: in a folder of runs, what is not one of their directories."""
    cache = Path(os.environ["XDG_CACHE_HOME"])
    return {
        "temporary files": files(Path(os.environ["TMPDIR"])),
        "files of the cache": files(cache) if cache.exists() else 0,
        "/dev/shm": files(Path("/dev/shm")),
        "files beside the runs": entries("fasttrain_runs") - runs,
        "sockets": sum(map(sockets, ("tcp", "tcp6", "udp", "udp6", "unix"))),
        "semaphores and their like": sum(map(of_system_v, ("sem", "shm", "msg"))),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "processes": sum(path.name.isdecimal() for path in Path("/proc").iterdir()),
        "descriptors": entries("/proc/self/fd"),
    }


def entries(folder):
    return len(list(Path(folder).iterdir()))


def files(folder):
    return sum(len(names) + len(folders) for _, folders, names in os.walk(folder))


def sockets(name):
    lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    return sum(name == "unix" or line.split()[3] != TIME_WAIT for line in lines)


def of_system_v(name):
    return len(Path(f"/proc/sysvipc/{name}").read_text().splitlines()) - 1


def settled(runs, before):
    """Count, and again for a while, as long as something is more than it was."""
    end_s = time.monotonic() + SETTLE_S
    got = counts(runs)
    while any(got[name] > before[name] for name in before) and time.monotonic() < end_s:
        time.sleep(0.05)
        got = counts(runs)
    return got


if __name__ == "__main__":
    got = {}
    for number in range(int(sys.argv[1])):
        run(number)
        got = settled(number + 1, got)
        print(json.dumps(got), flush=True)
