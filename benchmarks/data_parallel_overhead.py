"""What injected data-parallel training costs per step against the same loop with DDP by hand.

Two runs of two gloo ranks each, one of each kind, are stopped and continued in turn by signals, so
that the machine's noise falls on both alike. Steps during which a run was stopped are left out.

The twin all-reduces its loss after each step, as a script does that logs it.

    python benchmarks/data_parallel_overhead.py
    python benchmarks/data_parallel_overhead.py --noise-floor   # the loop by hand against itself
"""

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from step_overhead import median_and_interval
from tables import print_heading, print_table

HERE = Path(__file__).resolve().parent
SIDES = ("hand", "other")


def command(side: str, args: argparse.Namespace, scratch: Path) -> list[str]:
    """Give the command line of a side."""
    loop = [str(args.steps), str(scratch / side), str(args.batch), str(args.width)]
    if side == "hand" or args.noise_floor:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node=2", str(HERE / "parallel_loop_by_hand.py"), *loop]
    options = ["--amp", "off", "--optimizer", "keep", "--quiet", "--run-dir", str(scratch / "run")]
    options += args.options
    start = [sys.executable, "-m", "fasttrain", "run", str(HERE / "parallel_loop.py")]
    return [*start, "--nproc-per-node", "2", *options, "--", *loop]


def workers(process: subprocess.Popen) -> list[psutil.Process]:
    """Give the two ranks: the children that have none of their own."""
    return [p for p in psutil.Process(process.pid).children(recursive=True) if not p.children()]


def signal_all(processes: list[psutil.Process], number: int) -> None:
    """Stop or continue the ranks."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # a run that has just ended
            os.kill(process.pid, number)


def take_turns(runs: dict[str, subprocess.Popen], block_s: float) -> list[tuple[str, float, float]]:
    """Let one run go at a time until both are through, and give who went when."""
    time.sleep(12)  # both import torch and warm up
    ranks = {side: workers(run) for side, run in runs.items()}
    turns = []
    signal_all(ranks["other"], signal.SIGSTOP)
    going = "hand"
    try:
        while all(run.poll() is None for run in runs.values()):
            begun = time.monotonic()
            time.sleep(block_s)
            turns.append((going, begun, time.monotonic()))
            other = SIDES[1 - SIDES.index(going)]
            signal_all(ranks[going], signal.SIGSTOP)
            signal_all(ranks[other], signal.SIGCONT)
            going = other
    finally:
        for side in SIDES:
            signal_all(ranks[side], signal.SIGCONT)
    return turns


def medians_s(ends: list[float], turns: list[tuple[float, float]]) -> list[float]:
    """Give the median step of each turn, of the steps that lie in it as a whole."""
    found = []
    for begun, ended in turns:
        inside = [at for at in ends if begun < at < ended]
        steps = [b - a for a, b in itertools.pairwise(inside)]
        if len(steps) > 5:
            found.append(statistics.median(steps[2:]))
    return found


def measure(args: argparse.Namespace, scratch: Path) -> tuple[str, ...]:
    """Run both sides and give a row of the table."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    runs = {
        side: subprocess.Popen(
            command(side, args, scratch), env=environ, stdout=subprocess.PIPE, text=True
        )
        for side in SIDES
    }
    turns = take_turns(runs, args.block_s)
    losses = {side: run.communicate()[0].split()[-1] for side, run in runs.items()}
    blocks = {}
    for side in SIDES:
        ends = [float(line) for line in (scratch / side).read_text().split()]
        blocks[side] = medians_s(ends, [(a, b) for who, a, b in turns if who == side])
    pairs = list(zip(blocks["hand"], blocks["other"], strict=False))
    hand, other = (statistics.median(blocks[side]) for side in SIDES)
    ratios = median_and_interval([b / a for a, b in pairs], ".4f")
    extra = median_and_interval([1e6 * (b - a) for a, b in pairs], "+.0f")
    agree = f"{abs(float(losses['hand']) / float(losses['other']) - 1):.1e}"
    times = (f"{1e3 * hand:.2f}", f"{1e3 * other:.2f}")
    return (*times, extra, ratios, str(len(pairs)), agree)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=512, help="samples of both ranks together")
    parser.add_argument("--width", type=int, default=512, help="features of the three layers")
    parser.add_argument("--block-s", type=float, default=1.0, help="seconds of a turn")
    parser.add_argument("--noise-floor", action="store_true")
    parser.add_argument("options", nargs="*", help="more options of fasttrain run, behind --")
    args = parser.parse_args()
    print_heading()
    with tempfile.TemporaryDirectory() as scratch:
        row = measure(args, Path(scratch))
    print("target: a ratio of at most 1.03\n")
    head = (
        "hand ms",
        "other ms",
        "extra us (95 %)",
        "ratio (95 %)",
        "pairs",
        "loss differs by",
    )
    print_table([head, row])


if __name__ == "__main__":
    main()
