"""Whether `fasttrain tune` finds the levers right on public scripts, with several seeds of each.

Takes the folder of tune_scripts.py. Each script is started once for each seed. bf16, the compiler
and fused optimizers are compared with plain calls, each by itself and on top of those before it
that were right; times are not compared (scripts/results_alone.py). A line for each run is added to
a file, and the table is printed of all that are in it. A number is the distance from fp64 as a part
of what is allowed. Where one step found it above 1, so that two more were looked at, it is followed
by the largest of all steps, in brackets.

    python benchmarks/tune_results.py CORPUS --results found.jsonl
    python benchmarks/tune_results.py CORPUS --results found.jsonl --only none  # the table alone
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tables import print_heading, print_table
from tune_scripts import SWITCHES, Script, read_corpus

WRAPPER = Path(__file__).with_name("scripts") / "results_alone.py"
# The number of threads and the allocator are not compared.
ENVIRON = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.mmap_max=65536"}
VERDICTS = {True: "right", False: "wrong", None: "not comparable"}


def compare(script: Script, seed: int, levers: list[str], budget: str) -> dict[str, Any]:
    """Return what was found of each lever, with the exit code and the last lines of stderr."""
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = Path(temporary, "r")
        options = [
            f"--{lever}={off}" for lever, (off, _) in SWITCHES.items() if lever not in levers
        ]
        options += ["--amp=bf16"] if "amp" in levers else []
        options += ["--budget", budget, "--run-dir", str(run_dir)]
        wrapped = replace(script, words=[str(WRAPPER), str(seed), *script.words])
        done = subprocess.run(
            wrapped.command("tune", *options), cwd=script.folder,
            env={**script.environ, **ENVIRON}, capture_output=True, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        files = sorted(run_dir.rglob("results.jsonl"))
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {
        "name": script.name, "seed": seed, "code": done.returncode, "found": found,
        "said": done.stderr.strip().splitlines()[-40:],
        "took_s": time.perf_counter() - began_s,
    }  # fmt: skip


def shown(found: dict[str, Any] | None) -> str:
    """Return the cell of one comparison."""
    if found is None:
        return "-"
    if found["idle"]:
        return "no effect"
    if found["right"] is None:
        return "?"
    if not found["distance"]:
        return "same bits"
    words = f"{part_of(found):.2f}"
    most = max(map(part_of, found["looks"]))
    return f"{words} ({most:.2f})" if len(found["looks"]) > 1 else words


def part_of(found: dict[str, Any]) -> float:
    """Return a distance as a part of the allowed one."""
    if not found["distance"]:
        return 0.0
    return float(found["distance"] / found["allowed"]) if found["allowed"] else math.inf


def print_runs(runs: list[dict[str, Any]]) -> None:
    """Print a line for each script and set of levers, the reasons of what isn't right, and sums."""
    seeds = sorted({run["seed"] for run in runs})
    rows = [("script", "levers", *(f"seed {seed}" for seed in seeds))]
    reasons: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    for name in dict.fromkeys(run["name"] for run in runs):
        found: dict[int, dict[str, Any]] = {seed: {} for seed in seeds}
        for run in (run for run in runs if run["name"] == name):
            found[run["seed"]] |= {" + ".join(one["levers"]): one for one in run["found"]}
        every = dict.fromkeys(levers for of_seed in found.values() for levers in of_seed)
        for levers in every or ("nothing was compared",):
            cells = [found[seed].get(levers) for seed in seeds]
            rows.append((name, levers, *map(shown, cells)))
            for one in filter(None, cells):
                verdict = "no effect" if one["idle"] else VERDICTS[one["right"]]
                verdicts[verdict] += 1
                if verdict != "right":
                    reasons[f"{name}, {levers}: {verdict}: {one['idle'] or one['reason']}"] += 1
    print_table(rows)
    print("\n" + ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items())))
    for reason, times in reasons.items():
        print(f"  {times} x {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--results", type=Path, required=True, help="a file of runs")
    parser.add_argument("--only", default="", help="names of scripts; all by default")
    parser.add_argument("--levers", default=",".join(SWITCHES), help="those to compare")
    parser.add_argument("--seeds", type=int, default=3, help="of each script")
    parser.add_argument("--budget", default="10m", help="of each run, which ends when all is known")
    args = parser.parse_args()
    print_heading()
    wanted, levers = list(filter(None, args.only.split(","))), args.levers.split(",")
    for seed in range(args.seeds):
        for script in read_corpus(args.corpus.resolve()):
            if not wanted or script.name in wanted:
                run = compare(script, seed, levers, args.budget)
                with args.results.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                print_runs([run])
    print_runs([json.loads(line) for line in args.results.read_text().splitlines()])


if __name__ == "__main__":
    main()
