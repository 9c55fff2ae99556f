# ruff: noqa: T201
"""Runs fasttrain's torchrun agent many times, forked from one process that has imported torch.

``python agents.py AGENTS.json``: a list of command lines of agents, program and script first. How
each ended goes to stdout, one number a line.
"""

import json
import os
import sys
from pathlib import Path

from fasttrain.agent import agent


def run(argv: list[str]) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(agent.main(argv))


if __name__ == "__main__":
    for argv in json.loads(Path(sys.argv[1]).read_text()):
        print(run(argv[2:]), flush=True)
