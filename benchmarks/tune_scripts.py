"""What `fasttrain tune` finds on public scripts, and whether another choice would have been faster.

Takes a folder with a corpus.json: a list "entries", each with the "name" of a script, the folder
"cwd" to run it in, its command "run", variables "env", and commands "pre" that are run before;
${CORPUS} stands for the folder. Each script is lengthened by its arguments, so that it doesn't end
before it is decided. For each the report is appended to a file, and the table is printed of all
that are in it.

With --exhaustive every combination of the levers, loader workers and ranks that tune compared is
timed against plain by `fasttrain run --prove`, whose two runs take turns, for each of the scripts
named. Printed is the ratio of what tune kept to the fastest: 1.00 if it is the same, and at most
1 / 0.97. The allocator is left out: `--prove` gives a variable to both runs.

    python benchmarks/tune_scripts.py CORPUS --budget 4m --results tuned.jsonl
    python benchmarks/tune_scripts.py CORPUS --results tuned.jsonl --exhaustive nanogpt,makemore
    python benchmarks/tune_scripts.py CORPUS --results tuned.jsonl --only none  # the table alone
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import print_heading, print_table

SOURCE = Path(__file__).resolve().parents[1] / "src"
# Words of the scripts' commands, and by what they are replaced.
LONGER = {
    "ex_mnist": {"--epochs 2": "--epochs 200"},
    "ex_siamese": {"--epochs 1": "--epochs 200"},
    "ex_mnist_hogwild": {"--epochs 1": "--epochs 200"},
    "ex_vae": {"--epochs 2": "--epochs 500"},
    "ex_dcgan_fake": {"--niter 1": "--niter 500"},
    "ex_time_sequence": {"--steps 2": "--steps 500"},
    "ex_imagenet": {"--epochs 1": "--epochs 200"},
    "nanogpt": {
        "--max_iters=40": "--max_iters=100000",
        "--eval_interval=20": "--eval_interval=5000",
    },
    "mingpt_adder": {"max_iters=60": "max_iters=100000"},
    "makemore": {"--max-steps 300": "--max-steps 1000000"},
    "gan_wgan_gp": {"--n_epochs 2": "--n_epochs 500"},
    "unet": {"--epochs 1": "--epochs 200"},
    "cleanrl_dqn": {"3000": "3000000"},
    "pl_fabric_mnist": {"--epochs 1": "--epochs 200"},
    "dlrm": {"--num-batches=40": "--num-batches=100000", "--data-size=3000": "--data-size=6400000"},
    "timm_train": {"--epochs 1": "--epochs 300"},
    "mmpretrain_lenet": {"max_epochs=1": "max_epochs=300"},
}
SWITCHES = {"compile": ("off", "default"), "optimizer": ("keep", "auto"), "amp": ("off", "bf16")}
WITHOUT = {"--loader-workers": "0", "--nproc-per-node": "1"}  # as plain python
SLOWEST = 1 / 0.98  # of plain
FARTHEST = 1 / 0.97  # of the fastest
UNKNOWN = 69  # exit code of --prove where the losses can't be told to be the same


@dataclass(frozen=True)
class Script:
    """A script of the corpus, ready to be run."""

    name: str
    folder: Path
    words: list[str]
    environ: dict[str, str]

    def command(self, *options: str) -> list[str]:
        """Return the command of fasttrain with its options for this script."""
        verb, *rest = options
        first = 2 if self.words[0] == "-m" else 1
        script = [*self.words[:first], "--", *self.words[first:]]
        return [sys.executable, "-m", "fasttrain", verb, *rest, *script]


def read_corpus(corpus: Path) -> list[Script]:
    text = (corpus / "corpus.json").read_text().replace("${CORPUS}", str(corpus))
    found = json.loads(text)
    base = {**os.environ, "CORPUS": str(corpus), "PYTHONPATH": str(SOURCE)}
    common = {name: os.path.expandvars(value) for name, value in found["env"].items()}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    scripts = []
    for entry in found["entries"]:
        own = {name: str(value) for name, value in entry["env"].items()}
        environ = {**base, **common, **own, "PATH": path}
        paths = (common.get("PYTHONPATH"), own.get("PYTHONPATH"), str(SOURCE))
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        folder = corpus / entry["cwd"]
        for line in entry["pre"]:
            subprocess.run(["bash", "-c", line], cwd=folder, env=environ, check=True)
        words = lengthened(entry["name"], entry["run"])
        scripts.append(Script(entry["name"], folder, words, environ))
    return scripts


def lengthened(name: str, words: list[str]) -> list[str]:
    """Return a command that trains for long.

    Raises:
        SystemExit: If the command has other words than `LONGER` knows.
    """
    text = "\0".join(words)
    for old, new in LONGER.get(name, {}).items():
        if (found := old.replace(" ", "\0")) not in text:
            raise SystemExit(f"{name}: its command has no {old!r}")
        text = text.replace(found, new.replace(" ", "\0"), 1)
    return text.split("\0")


def tune(script: Script, budget: str) -> dict[str, Any]:
    """Return the report of tune on a script; without "compared" if there is none."""
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        command = script.command(
            "tune", "--json", "--budget", budget, "--run-dir", f"{temporary}/r"
        )
        done = subprocess.run(
            command, cwd=script.folder, env=script.environ, capture_output=True, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        report = json.loads(done.stdout)["data"]
    except (ValueError, KeyError):
        report = {}
    took_s = time.perf_counter() - began_s
    return {"name": script.name, "code": done.returncode, "took_s": took_s, **report}


def kept(report: dict[str, Any], part: str = "compared") -> list[str]:
    """Return the levers that were kept, or the "settings"."""
    return [lever for one in report.get(part, ()) if one["kept"] for lever in one["levers"]]


def ratio_of(report: dict[str, Any]) -> dict[str, float] | None:
    """Return the ratio of all that was kept to plain; None if nothing was."""
    if report.get("together"):
        found: dict[str, float] = report["together"]["ratio"]
        return found
    ratios = [one["ratio"] for one in report.get("compared", ()) if one["kept"]]
    return ratios[0] if ratios else None


def shown(ratio: dict[str, float]) -> str:
    return "{middle:.3f} ({low:.3f} to {high:.3f})".format(**ratio)


def print_reports(reports: list[dict[str, Any]]) -> None:
    """Print a line for each script, and the geometric mean of the ratios to plain."""
    rows = [("script", "kept", "ratio to plain (95 %)", "on top of that", "not kept", "s")]
    middles = []
    for report in reports:
        ratio = ratio_of(report)
        settings = [one for one in report.get("settings", ()) if one["kept"]]
        middles.append(
            math.prod(one["middle"] for one in (ratio, *(s["ratio"] for s in settings)) if one)
        )
        more = ", ".join(f"{s['levers'][0]} {s['asked']} {shown(s['ratio'])}" for s in settings)
        others = [
            f"{'+'.join(one['levers'])}: {one['verdict']}"
            for one in (*report.get("compared", ()), *report.get("settings", ()))
            if not one["kept"]
        ]
        end = "; ".join(others) or f"exit code {report['code']}"
        words = " + ".join(kept(report)) or "nothing"
        found = shown(ratio) if ratio else "1"
        rows.append((report["name"], words, found, more, end, f"{report['took_s']:.0f}"))
    print_table(rows)
    mean = math.exp(statistics.fmean(map(math.log, middles)))
    slow = sum(middle > SLOWEST for middle in middles)
    print(f"\ngeometric mean {mean:.3f} of {len(middles)}; slower than 1 / 0.98 of plain: {slow}\n")


def options_compared(report: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the options that were compared, by lever or setting: without it, and with it."""
    found = {}
    for one in report["compared"]:
        lever = one["levers"][0]
        if lever in SWITCHES and one["verdict"] != "no effect":
            off, on = SWITCHES[lever]
            found[lever] = (f"--{lever}={off}", f"--{lever}={on}")
    for setting in report.get("settings", ()):
        option = setting["variable"].partition("=")[0]
        if option in WITHOUT:
            found[setting["levers"][0]] = (f"{option}={WITHOUT[option]}", setting["variable"])
    return found


def search_all(script: Script, report: dict[str, Any], steps: int, rounds: int) -> None:
    """Time every combination of the compared options, and print what the choice lost."""
    options = options_compared(report)
    choices = list(itertools.product((False, True), repeat=len(options)))
    ratios: dict[tuple[bool, ...], list[float]] = {choices[0]: [1.0]}  # plain
    for _ in range(rounds):
        for choice in choices[1:]:
            wanted = [values[on] for values, on in zip(options.values(), choice, strict=True)]
            ratios.setdefault(choice, []).append(ratio_to_plain(script, wanted, steps))
    medians = {choice: statistics.median(found) for choice, found in ratios.items()}
    all_kept = [*kept(report), *kept(report, "settings")]
    chosen = tuple(name in all_kept for name in options)
    fastest = min(medians, key=lambda choice: medians[choice])

    def words(choice: tuple[bool, ...]) -> str:
        on = (name for name, is_on in zip(options, choice, strict=True) if is_on)
        return "+".join(on) or "plain"

    listed = ", ".join(f"{words(c)} {medians[c]:.3f}" for c in choices)
    lost = medians[chosen] / medians[fastest]
    word = "ok" if lost <= FARTHEST else "too slow"
    print(
        f"{script.name}: kept {words(chosen)}, fastest {words(fastest)}, ratio {lost:.3f}, {word};"
        f" ratios to plain: {listed}",
        flush=True,
    )


def ratio_to_plain(script: Script, options: list[str], steps: int) -> float:
    """Return the time of a step with these options over that of plain python.

    Levers that aren't among them are off. Infinite if the losses are others with them. Where
    rounding leads so far that it can't be told, as in a long training of a GAN, it is the time all
    the same.
    """
    named = {option.partition("=")[0] for option in options}
    off = [f"--{lever}={off}" for lever, (off, _) in SWITCHES.items() if f"--{lever}" not in named]
    with tempfile.TemporaryDirectory() as temporary:
        command = script.command(
            "run", "--prove", "--json", *options, *off, "--max-steps", str(steps),
            "--run-dir", f"{temporary}/r",
        )  # fmt: skip
        done = subprocess.run(
            command, cwd=script.folder, env=script.environ, capture_output=True, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    if done.returncode not in (0, UNKNOWN) or not (
        speed := json.loads(done.stdout)["data"]["speed"]
    ):
        return math.inf
    return float(speed["ratio"]["middle"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--results", type=Path, required=True, help="a file of reports")
    parser.add_argument("--only", default="", help="names of scripts to tune; all by default")
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--exhaustive", default="", help="names of scripts that are in the results")
    parser.add_argument("--steps", type=int, default=200, help="of each run of --exhaustive")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    print_heading()
    scripts = {script.name: script for script in read_corpus(args.corpus.resolve())}
    wanted = [] if args.exhaustive else list(filter(None, args.only.split(","))) or list(scripts)
    for name in wanted:
        if name in scripts:
            report = tune(scripts[name], args.budget)
            with args.results.open("a") as file:
                file.write(json.dumps(report) + "\n")
            print_reports([report])
    reports = {one["name"]: one for one in map(json.loads, args.results.read_text().splitlines())}
    for name in filter(None, args.exhaustive.split(",")):
        search_all(scripts[name], reports[name], args.steps, args.rounds)
    print_reports(list(reports.values()))


if __name__ == "__main__":
    main()
