"""Secrets in every place where a user may keep one, looked for in all that fasttrain says."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fasttrain.planning.explain import SET_FIRST

PLANTED = "s3same"  # each secret begins with it, and nothing else here holds it


def secret(name: str) -> str:
    return f"{PLANTED}-{name}-8f3a%2F"


ENVIRON = {
    "HF_TOKEN": secret("hf"),
    "WANDB_API_KEY": secret("wandb"),
    "AWS_ACCESS_KEY_ID": secret("aws-id"),
    "AWS_SECRET_ACCESS_KEY": secret("aws-key"),
    "AWS_SESSION_TOKEN": secret("aws-session"),
    "DB_PASSWORD": secret("db"),
    "MYSQL_PASSWD": secret("mysql"),
    "DATABASE_URL": f"postgres://me:{secret('database')}@db:5432/runs",
    "https_proxy": f"http://me:{secret('proxy')}@proxy:3128",
    "FASTTRAIN_ENV": f"FROM_ENV_TOKEN={secret('variable')}",
}
OPTIONS = (
    "--env", f"FROM_FLAG_SECRET={secret('flag')}",
    "--env", f"DATA_URL=s3://me:{secret('data')}@bucket/x",
)  # fmt: skip
ARGS = (
    "--api-key", secret("arg"), f"--password={secret('equals')}", f"login.token={secret('hydra')}",
    "--db", f"postgres://me:{secret('url')}@db/x", f"--store=https://{secret('user')}@host/x",
    "--wandb", ENVIRON["WANDB_API_KEY"], f"--note=by {ENVIRON['HF_TOKEN']}",
)  # fmt: skip
FILE = f"env: {{FROM_FILE_TOKEN: {secret('file')}}}\n"
OF_WORKER = {
    "FROM_ENV_TOKEN": secret("variable"), "FROM_FLAG_SECRET": secret("flag"),
    "FROM_FILE_TOKEN": secret("file"), "HF_TOKEN": secret("hf"),
    "DATA_URL": f"s3://me:{secret('data')}@bucket/x",
}  # fmt: skip
# Rank 1 tells all that it knows, in its log and in its end; the worker has to have it for that.
TELLS = """
import json, os, sys, time, torch

open(f"had-{os.environ['RANK']}", "w").write(json.dumps([dict(os.environ), sys.argv[1:]]))
if os.environ["RANK"] == "1":
    print(dict(os.environ), sys.argv[1:])
    print("denied:", *os.environ.values())
    sys.stdout.flush()
    try:
        raise PermissionError(13, "denied", os.environ["DATABASE_URL"])
    except PermissionError:
        raise RuntimeError(" ".join([*os.environ.values(), *sys.argv])) from None
time.sleep(60)
"""
TWO = ("--nproc-per-node", "2", "--device", "cpu", "--strategy", "none")


def leaks(text: str | bytes) -> list[str]:
    """Return each secret in a text with what stands before it."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    places = text.split(PLANTED)
    return [before[-80:] + PLANTED + after[:30] for before, after in pairwise(places)]


@pytest.fixture
def place(fasttrain: Any, script: Any, tmp_path: Path) -> Iterator[Any]:
    """Run fasttrain where secrets are everywhere."""
    script(TELLS)
    (tmp_path / "fasttrain.yaml").write_text(FILE)

    def run(*words: str, env: bool = True) -> subprocess.CompletedProcess[bytes]:
        done: subprocess.CompletedProcess[bytes] = fasttrain(*words, env=ENVIRON if env else {})
        return done

    return run


def test_a_run_that_fails_tells_nothing(place: Any, tmp_path: Path) -> None:
    options = ("train.py", *TWO, "--run-dir", "run", *OPTIONS)
    done = place("run", *options, "--", *ARGS)
    assert done.returncode == 1, done.stderr.decode()
    for rank in (0, 1):
        environ, args = json.loads((tmp_path / f"had-{rank}").read_text())
        assert tuple(args) == ARGS
        assert {name: environ[name] for name in OF_WORKER} == OF_WORKER
    found = {
        path.name: leaks(path.read_bytes())
        for path in (tmp_path / "run").rglob("*")
        if path.is_file() and path.name not in ("rank-0.log", "rank-1.log")
    }
    assert set(found) >= {"plan.json", "receipt.json", "crash.json", "failure-1.json", "ends.json"}
    assert {name: told for name, told in found.items() if told} == {}
    told = done.stderr.decode()
    assert "fasttrain: rank 1 " in told
    assert "RuntimeError" in told
    assert "    | denied:" in told, "the end of its log is on the card"
    assert leaks(told) == []
    assert leaks(done.stdout) == []
    shown = place("report", "run", "--json")
    assert shown.returncode == 0
    assert leaks(shown.stdout + shown.stderr) == []


def test_a_plan_tells_nothing(place: Any) -> None:
    for form in (("--dry-run",), ("--dry-run", "--json"), ("--explain",), ("--explain", "--json")):
        done = place("run", "train.py", *TWO, *OPTIONS, *form, "--", *ARGS)
        assert done.returncode == 0, done.stderr.decode()
        assert leaks(done.stdout + done.stderr) == [], form


def test_a_plan_that_is_pasted_asks_for_each_secret(place: Any, fasttrain: Any) -> None:
    text = place("run", "train.py", *TWO, *OPTIONS, "--dry-run", "--", *ARGS).stdout
    done = subprocess.run(
        ["sh"], input=text, capture_output=True, cwd=fasttrain.cwd, env=fasttrain.environ
    )
    assert done.returncode != 0
    assert SET_FIRST.encode() in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("run", "train.py", *ARGS),
        ("run", "train.py", "--env", secret("bare")),
        ("run", "train.py", "--env", f"A B={secret('space')}"),
        ("run", "train.py", "--run-dir", "/proc/x", *OPTIONS, "--", *ARGS),
        ("doctor", "--quick", "--json"),
        ("ps", "--json"),
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_errors_and_the_machine_tell_nothing(place: Any, words: tuple[str, ...]) -> None:
    done = place(*words)
    assert done.stdout or done.stderr
    assert leaks(done.stdout + done.stderr) == []
