"""Total wall time of runs with ``--compile off``, ``default`` and ``auto``, which take turns.

For each model and number of steps: always (``default``) and never (``off``), with a cold and a warm
compile cache, and ``auto`` without a history and with the history of the run before. Each run is a
process of its own. The ratio is that to the better of always and never with the same cache.

With ``--repeat`` they take turns as often, and medians are printed. Where always took more than
`FAR` times as long as never it is run once: it can't be the better one.

With ``--launches`` each run has one step: under ``default`` with a cold cache and with what that
has left, and under ``off``, which no cache can shorten.

With ``--stalls`` each model is compiled whether that pays or not, for what the switch costs: its
history is made to say that the run is long and compiled steps take half of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TRAINS = Path(__file__).parent / "scripts" / "train_model.py"
CACHES = ("cold", "warm")
MODES = ("default", "off", "auto")
FAR = 1.3


@dataclass(frozen=True)
class Took:
    """One run: its wall time, and what the receipt says of compilation."""

    wall_s: float
    reason: str
    stall_s: float


def run(folder: Path, cache: Path, mode: str, words: list[str]) -> Took:
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    argv = [sys.executable, "-m", "fasttrain", "run", str(TRAINS), "--compile", mode, "--", *words]
    known = set(folder.glob("fasttrain_runs/*/receipt.json"))
    began_s = time.perf_counter()
    done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True)
    wall_s = time.perf_counter() - began_s
    if done.returncode:
        sys.exit(done.stderr)
    (path,) = set(folder.glob("fasttrain_runs/*/receipt.json")) - known
    outcomes = json.loads(path.read_text())["ranks"][0]["outcomes"]
    reason = next(one["reason"] for one in outcomes if one["lever"] == "compile")
    found = path.with_name("compile_auto.json")
    stall_s = json.loads(found.read_text())["stall_s"] if found.exists() else 0.0
    return Took(wall_s, reason, stall_s)


def compare(model: str, steps: int, cache: str, repeats: int, *, forget: bool) -> None:
    """Let all three take turns, and print a line."""
    words = ["--model", model, "--steps", str(steps)]
    took: dict[str, list[Took]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as temporary:
        folder, filled = Path(temporary) / "runs", Path(temporary) / "filled"
        folder.mkdir()
        filled.mkdir()
        if cache == "warm":
            run(folder, filled, "default", words)
        for number in range(repeats):
            for mode in MODES:
                if mode == "default" and number and far(took):
                    continue
                if mode == "auto" and forget:
                    (folder / "fasttrain_runs/history.json").unlink(missing_ok=True)
                own = Path(temporary) / f"{mode}-{number}"
                shutil.copytree(filled, own, symlinks=True)
                took[mode].append(run(folder, own, mode, words))
    shown = {mode: median_s(runs) for mode, runs in took.items()}
    ratio = shown["auto"] / min(shown["default"], shown["off"])
    stall_s = statistics.median(one.stall_s for one in took["auto"])
    print(
        f"{model:8} {steps:6,} {cache:5} {'no history' if forget else 'history':10}"
        f" {shown['off']:8.1f} {shown['default']:8.1f} {shown['auto']:8.1f}"
        f" {ratio:6.2f} {stall_s:6.1f}  {took['auto'][-1].reason}",
        flush=True,
    )


def stall(model: str, seconds: float) -> None:
    """Have a run of so many seconds compiled, and print what the switch cost it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary) / "runs", Path(temporary) / "cache"
        folder.mkdir()
        run(folder, cache, "off", ["--model", model, "--steps", "200"])
        history = folder / "fasttrain_runs/history.json"
        known = json.loads(history.read_text())
        entry = known["runs"][-1]
        step_s = entry["known"]["plain_step_s"]
        steps = max(200, int(seconds / step_s))
        words = ["--model", model, "--steps", str(steps)]
        entry["of"]["args"] = words
        entry["known"] |= {"steps": 1000 * steps, "compiled_step_s": step_s / 2}
        history.write_text(json.dumps(known))
        took = run(folder, cache, "auto", words)
    print(f"{model:8} {steps:6,} {took.wall_s:8.1f} {took.stall_s:6.1f}  {took.reason}", flush=True)


def launches(model: str, repeats: int) -> None:
    """Compare the time to the first step of a second launch with that of the first one."""
    took: dict[str, list[Took]] = {"off": [], "cold": [], "second": []}
    words = ["--model", model, "--steps", "1"]
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as temporary:
            folder, cache = Path(temporary) / "runs", Path(temporary) / "cache"
            folder.mkdir()
            for name, mode in (("cold", "default"), ("off", "off"), ("second", "default")):
                took[name].append(run(folder, cache, mode, words))
    shown = {name: median_s(runs) for name, runs in took.items()}
    ratios = f"{shown['second'] / shown['cold']:6.2f} {shown['off'] / shown['cold']:10.2f}"
    print(f"{model:8} " + " ".join(f"{s:8.1f}" for s in shown.values()) + f" {ratios}", flush=True)


def far(took: dict[str, list[Took]]) -> bool:
    return median_s(took["default"]) > FAR * median_s(took["off"])


def median_s(runs: list[Took]) -> float:
    return statistics.median(one.wall_s for one in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="mlp,conv,gpt")
    parser.add_argument("--steps", default="300,3000,30000")
    parser.add_argument("--caches", default=",".join(CACHES))
    parser.add_argument("--history", choices=("both", "with", "without"), default="both")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each")
    parser.add_argument("--launches", action="store_true", help="runs of one step")
    parser.add_argument("--stalls", type=float, metavar="S", help="runs of so many seconds")
    options = parser.parse_args()
    if options.launches:
        print(f"{'model':8}    off s   cold s second s  ratio  off / cold")
        for model in options.models.split(","):
            launches(model, options.repeat)
        return
    if options.stalls:
        print(f"{'model':8} {'steps':>6}   auto s  stall")
        for model in options.models.split(","):
            stall(model, options.stalls)
        return
    print(f"{'model':8} {'steps':>6} {'cache':5} {'':10}    off s default s   auto s  ratio  stall")
    for model in options.models.split(","):
        for steps in map(int, options.steps.split(",")):
            for cache in options.caches.split(","):
                for forget in (True, False):
                    if options.history in ("both", "without" if forget else "with"):
                        compare(model, steps, cache, options.repeat, forget=forget)


if __name__ == "__main__":
    main()
