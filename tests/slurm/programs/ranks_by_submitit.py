"""Runs a function on two nodes by submitit, and prints what each rank gave, in their order.

The argument is a folder for submitit's files.
"""

from __future__ import annotations

import os
import socket
import sys

import submitit


def tell() -> list[object]:
    """Return who this rank is."""
    rank = submitit.JobEnvironment().global_rank
    return [rank, socket.gethostname(), len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))]


if __name__ == "__main__":
    executor = submitit.AutoExecutor(folder=sys.argv[1], cluster="slurm")
    executor.update_parameters(nodes=2, tasks_per_node=2, gpus_per_node=8, timeout_min=5)
    for result in executor.submit(tell).results():
        sys.stdout.write(f"{result}\n")
