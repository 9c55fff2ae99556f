"""Total wall time of runs with ``--compile off``, ``default`` and ``auto``, which take turns.

For each model and number of steps: always (``default``) and never (``off``), with a cold and a warm
compile cache, and ``auto`` without a history and with the history of the run before. Each run is a
process of its own. The ratio is that to the better of always and never with the same cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TRAINS = Path(__file__).parent / "scripts" / "train_model.py"
CACHES = ("cold", "warm")


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


def compare(model: str, steps: int, cache: str, *, forget: bool) -> None:
    """Run all three once, and print a line for each."""
    words = ["--model", model, "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        folder = base / "runs"
        folder.mkdir()
        caches = {mode: base / f"cache-{mode}" for mode in ("off", "default", "auto")}
        if cache == "warm":
            run(folder, caches["default"], "default", words)
            shutil.copytree(caches["default"], caches["auto"], symlinks=True)
        took = {mode: run(folder, caches[mode], mode, words) for mode in ("default", "off")}
        if forget:
            (folder / "fasttrain_runs/history.json").unlink(missing_ok=True)
        took["auto"] = run(folder, caches["auto"], "auto", words)
    best_s = min(took["default"].wall_s, took["off"].wall_s)
    history = "no history" if forget else "history"
    print(
        f"{model:5} {steps:6,} {cache:5} {history:10}"
        f" {took['off'].wall_s:8.1f} {took['default'].wall_s:8.1f} {took['auto'].wall_s:8.1f}"
        f" {took['auto'].wall_s / best_s:6.2f} {took['auto'].stall_s:6.1f}  {took['auto'].reason}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="mlp,conv,gpt")
    parser.add_argument("--steps", default="300,3000,30000")
    parser.add_argument("--caches", default=",".join(CACHES))
    parser.add_argument("--history", choices=("both", "with", "without"), default="both")
    options = parser.parse_args()
    print(f"{'model':5} {'steps':>6} {'cache':5} {'':10}    off s default s   auto s  ratio  stall")
    for model in options.models.split(","):
        for steps in map(int, options.steps.split(",")):
            for cache in options.caches.split(","):
                for forget in (True, False):
                    if options.history in ("both", "without" if forget else "with"):
                        compare(model, steps, cache, forget=forget)


if __name__ == "__main__":
    main()
