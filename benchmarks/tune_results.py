"""Whether `fasttrain tune` finds the levers right on public scripts, with several seeds of each.

Takes the folder of tune_scripts.py. Each script is started once for each seed. bf16, the compiler
and fused optimizers are compared with plain calls, each by itself and on top of those before it
that were right; times are not compared (scripts/results_alone.py). A line for each run is added to
a file, and the table is printed of all that are in it; of two runs with the same seed, the later
one counts. A number is the distance from fp64 as a part of what is allowed: the largest of all
steps that were looked at, with all seeds, of which the number follows. One step above 1 doesn't
make a lever wrong, for then two more are looked at.

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


def shown(of_seeds: list[dict[str, Any]]) -> str:
    """Return the cell of one comparison, with what was found with each seed."""
    if not of_seeds:
        return "-"
    verdicts = Counter(verdict(found) for found in of_seeds)
    if "no effect" in verdicts:
        return "no effect"
    bad = [f"{verdicts[word]} {word}" for word in VERDICTS.values() if word != "right"]
    if verdicts["right"] < len(of_seeds):
        return ", ".join(words for words in bad if words[0] != "0") + f" x{len(of_seeds)}"
    most = max(part_of(one) for found in of_seeds for one in found["looks"])
    return f"{most:.2f} x{len(of_seeds)}" if most else f"same bits x{len(of_seeds)}"


def verdict(found: dict[str, Any]) -> str:
    return "no effect" if found["idle"] else VERDICTS[found["right"]]


def part_of(found: dict[str, Any]) -> float:
    """Return a distance as a part of the allowed one."""
    if not found["distance"]:
        return 0.0
    return float(found["distance"] / found["allowed"]) if found["allowed"] else math.inf


def print_runs(runs: list[dict[str, Any]]) -> None:
    """Print a line for each script, sums, and the reasons of what isn't right."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for run in runs:
        for one in run["found"]:
            found.setdefault((run["name"], " + ".join(one["levers"])), {})[run["seed"]] = one
    every = sorted({levers for _, levers in found}, key=lambda it: ("compile" in it, len(it), it))
    rows = [("script", *every)]
    for name in dict.fromkeys(run["name"] for run in runs):
        cells = (found.get((name, levers), {}) for levers in every)
        rows.append((name, *(shown(list(of_seeds.values())) for of_seeds in cells)))
    print_table(rows)
    print_sums({key: list(of_seeds.values()) for key, of_seeds in found.items()})


def print_sums(found: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    each = [one for of_seeds in found.values() for one in of_seeds]
    looks = [look for one in each for look in one["looks"]]
    verdicts = Counter(map(verdict, each))
    print("\n" + ", ".join(f"{n} {word}" for word, n in sorted(verdicts.items())))
    print(f"{len(looks)} steps, of which {sum(look['right'] is False for look in looks)} too far")
    reasons: Counter[str] = Counter()
    for (name, levers), of_seeds in found.items():
        for one in of_seeds:
            bad = [f"a step: {look['reason']}" for look in one["looks"] if not look["right"]]
            bad += [f"{verdict(one)}: {one['idle']}"] if not one["looks"] else []
            reasons.update(f"{name}, {levers}, {reason}" for reason in bad)
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
