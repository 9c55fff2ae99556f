"""What a run shows while it goes, and what it keeps."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

TRAIN = """
import time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.15)
print("loss is low")
"""


def test_a_line_is_shown_before_the_script_ends(fasttrain: Any, script: Any) -> None:
    path = script("print('first', flush=True)\nprint('got', input())")
    with fasttrain.start(
        "run", path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        # The script goes on only when it is answered, so its first line can't have waited.
        assert process.stdout.readline() == b"first\n"
        assert process.communicate(b"an answer\n", timeout=240)[0] == b"got an answer\n"
    assert process.returncode == 0


def test_progress_on_a_terminal(fasttrain: Any, script: Any, terminal: Any) -> None:
    screen = terminal(fasttrain.argv("run", script(TRAIN), "--amp", "off"))
    assert screen.end() == 0
    before, after = screen.screen.split(b"loss is low\r\n")
    assert b"fasttrain: step " in before
    assert b"12 steps, median" in after, "the receipt follows the script's last line"
    # The line is taken away: what stands on the screen at the end is the receipt alone.
    assert b"fasttrain: step" not in after.split(b"\x1b[2K")[-1]


def test_no_progress_in_a_pipe_and_all_is_kept(
    fasttrain: Any, script: Any, only_run_dir: Any
) -> None:
    done = fasttrain("run", script(TRAIN), "--amp", "off")
    assert (done.returncode, done.stdout) == (0, b"loss is low\n")
    assert b"fasttrain: step" not in done.stderr
    assert b"\x1b" not in done.stderr
    run_dir = only_run_dir()
    assert (run_dir / "rank-0.log").read_bytes() == b"loss is low\n"
    receipt = json.loads((run_dir / "receipt.json").read_text())
    assert receipt["ranks"][0]["stats"]["steps"] == 12
    assert receipt["ranks"][0]["finished"] is True
    events = [json.loads(line) for line in (run_dir / "events-0.jsonl").read_text().splitlines()]
    assert events[-1]["step"] == 12
    modes = {stat.S_IMODE(path.stat().st_mode) for path in run_dir.iterdir()}
    assert (stat.S_IMODE(run_dir.stat().st_mode), modes) == (0o700, {0o600})


def test_a_run_that_is_ended_has_made_all_its_steps(
    fasttrain: Any, script: Any, only_run_dir: Any
) -> None:
    """The rank's own report is some seconds old then."""
    quick = TRAIN.replace("0.15", "0.01").replace("range(12)", "range(195)")
    path = script(f"{quick}\nprint('trained', flush=True)\ntime.sleep(60)")
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with fasttrain.start("run", path, "--amp", "off", **options) as process:
        assert [process.stdout.readline() for _ in "12"] == [b"loss is low\n", b"trained\n"]
        process.send_signal(signal.SIGTERM)
        told = process.stderr.read().decode()
    assert "195 steps" in told
    (rank,) = json.loads((only_run_dir() / "receipt.json").read_text())["ranks"]
    assert (rank["stats"]["steps"], rank["finished"]) == (195, False)


def test_quiet_says_nothing(fasttrain: Any, script: Any) -> None:
    done = fasttrain("run", script("print(1)"), "--quiet")
    assert (done.stdout, done.stderr) == (b"1\n", b"")


def test_json_receipt_on_stderr(fasttrain: Any, script: Any) -> None:
    done = fasttrain("run", script("print(1); raise SystemExit(9)"), "--json")
    receipt = json.loads(done.stderr)
    assert (receipt["kind"], receipt["data"]["exit_code"]) == ("receipt", 9)
    assert (done.stdout, done.returncode) == (b"1\n", 9)


def test_secrets_stay_out_of_every_file(fasttrain: Any, script: Any, only_run_dir: Any) -> None:
    path = script("import os, sys; assert sys.argv[2] == os.environ['API_TOKEN'] == 's3cr3t'")
    options = ("--env", "API_TOKEN=s3cr3t", "--", "--api-key", "s3cr3t")
    done = fasttrain("run", path, *options)
    assert done.returncode == 0
    assert b"s3cr3t" not in done.stdout + done.stderr
    kept = [file for file in only_run_dir().iterdir() if b"s3cr3t" in file.read_bytes()]
    assert kept == []


def test_any_command(fasttrain: Any) -> None:
    words = ("run", "--no-python", "sh", "--quiet", "--")
    done = fasttrain(*words, "-c", 'printf "%s|" "$0" "$@"; exit 6', "a b", "--amp", "$(x)")
    assert (done.stdout, done.returncode) == (b"a b|--amp|$(x)|", 6)


def test_a_command_starts_with_the_signals_of_a_shell(fasttrain: Any) -> None:
    # Python ignores SIGPIPE and passes that on; `yes | head` would then end in an error message.
    look = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]
    shell = subprocess.run(look, capture_output=True, stdin=subprocess.DEVNULL)
    done = fasttrain("run", "--no-python", "--quiet", "--", *look)

    def masks(said: bytes) -> list[int]:
        # Up to signal 31: glibc has those that it uses itself ignored in what it spawns.
        return [int(line.split()[1], 16) & 0x7FFFFFFF for line in said.splitlines()]

    assert len(masks(shell.stdout)) == 2
    assert masks(done.stdout) == masks(shell.stdout)


def test_a_dry_run_can_be_pasted_and_run(fasttrain: Any, script: Any, tmp_path: Path) -> None:
    path = script("import sys; print(sys.argv[1:]); sys.exit(3)")
    planned = fasttrain("run", path, "--dry-run", "--", "it's", "$(x)", "two\nlines")
    assert planned.returncode == 0
    assert not (tmp_path / "fasttrain_runs").exists()
    done = subprocess.run(["sh"], input=planned.stdout, capture_output=True, env=fasttrain.environ)
    assert done.stdout.decode() == "[\"it's\", '$(x)', 'two\\nlines']\n"
    assert done.returncode == 3


def test_two_runs_at_once_share_nothing(fasttrain: Any, script: Any, tmp_path: Path) -> None:
    path = script("import sys, time; time.sleep(0.5); print(sys.argv[1] * 3)")
    runs = [fasttrain.start("run", path, word, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for word in "abc"]  # fmt: skip
    assert [run.communicate(timeout=240)[0] for run in runs] == [b"aaa\n", b"bbb\n", b"ccc\n"]
    logs = sorted(log.read_bytes() for log in tmp_path.glob("fasttrain_runs/*/rank-0.log"))
    assert logs == [b"aaa\n", b"bbb\n", b"ccc\n"]


def test_rank_of_a_foreign_launcher_hides_nothing(fasttrain: Any, script: Any) -> None:
    done = fasttrain("run", script("print('shown')"), "--quiet", env={"RANK": "3"})
    assert done.stdout == b"shown\n"


def test_a_foreign_rank_changes_nothing_in_a_run_without_an_agent(fasttrain, script, tmp_path):
    path = script("import torch; torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()")
    foreign = {"RANK": "of the cluster", "WORLD_SIZE": "two"}
    done = fasttrain("run", path, "--run-dir", "run", env=foreign)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "rank-0.json").exists()
    assert b"1 step" in done.stderr
