"""Real failures that look like something else: what the card must not say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = {
    # The parser's error comes before what it ends the script with.
    "arguments": (
        "usage",
        "invalid float value: 'abc'",
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', type=float)\n"
        "parser.parse_args(['--lr', 'abc'])",
    ),
    "library's arguments": (
        "exception",
        "ArgumentError",
        "import ctypes\nctypes.CDLL(None).getpid(object())",
    ),
    # What was handled when something else went wrong.
    "handled file": (
        "exception",
        "ValueError: loss diverged",
        "try: open('last.pt')\nexcept FileNotFoundError: raise ValueError('loss diverged')",
    ),
    "handled network": (
        "exception",
        "KeyError: 'weights'",
        "try: raise ConnectionError('offline')\nexcept ConnectionError: {}['weights']",
    ),
    "handled full disk": (
        "disk-full",
        "",
        "try: open('/dev/full', 'w', buffering=1).write('all of it\\n')\n"
        "except OSError: raise RuntimeError('no checkpoint')",
    ),
    "named cause": (
        "file-missing",
        " last.pt",
        "try: open('last.pt')\n"
        "except OSError as error: raise RuntimeError('nothing to go on from') from error",
    ),
    "handled and left": (
        "file-missing",
        " last.pt",
        "import sys\ntry: open('last.pt')\nexcept OSError: sys.exit(1)",
    ),
    # Words that are the error's own.
    "another directory": (
        "file-missing",
        " {cwd}/elsewhere",
        "import os\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\nopen('data.pt')",
    ),
    "apostrophes": (
        "file-missing",
        "Couldn't find a script at /d/x.py. It isn't there",
        "raise FileNotFoundError(\"Couldn't find a script at /d/x.py. It isn't there\")",
    ),
    "no file": (
        "not-permitted",
        "[Errno 1] Operation not permitted",
        "import errno, os\nraise PermissionError(errno.EPERM, os.strerror(errno.EPERM))",
    ),
    "message without a module": (
        "module-missing",
        "please install it",
        "raise ModuleNotFoundError('please install it')",
    ),
    # Time-outs that no network has.
    "lock": (
        "exception",
        "Timeout: The lock",
        "class Timeout(TimeoutError): pass\nraise Timeout('The lock could not be acquired.')",
    ),
    "socket": (
        "network",
        "timed out",
        "import socket\nours, theirs = socket.socketpair()\nours.settimeout(0.01)\nours.recv(1)",
    ),
    "peer of no rank": (
        "exception",
        "S3 error",
        "raise RuntimeError('S3 error: curlCode: 56, Connection reset by peer')",
    ),
    "last line of stdout": (
        "aborted",
        " train.py:3",
        "import os\nprint('epoch 3 loss 0.5', flush=True)\nos.abort()",
    ),
    "group": (
        "device-memory",
        " 2.00 GiB",
        "raise ExceptionGroup('two', [KeyError('a'), RuntimeError('CUDA out of memory. Tried to"
        " allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1.00 GiB is free')])",
    ),
    "group of unknown ones": (
        "exception",
        "KeyError: 'a'",
        "raise ExceptionGroup('two', [KeyError('a'), ValueError('b')])",
    ),
}


def crash_in(run_dir: Path) -> dict[str, Any]:
    crash: dict[str, Any] = json.loads((run_dir / "crash.json").read_text())
    return crash


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_is_told_for_what_it_is(
    fasttrain: Any, script: Any, only_run_dir: Any, name: str
) -> None:
    cause, words, text = SCRIPTS[name]
    fasttrain("run", script(text))
    crash = crash_in(only_run_dir())
    assert crash["cause"] == cause
    assert words.format(cwd=fasttrain.cwd) in crash["why"]
    assert "epoch 3" not in crash["why"], "a line of stdout"


def test_a_pool_that_takes_too_long_is_no_network(
    fasttrain: Any, script: Any, only_run_dir: Any
) -> None:
    path = script(
        "import multiprocessing, time\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.Pool(1) as pool:\n"
        "        pool.apply_async(time.sleep, (30,)).get(timeout=0.1)\n"
    )
    fasttrain("run", path)
    crash = crash_in(only_run_dir())
    assert (crash["cause"], crash["why"]) == ("exception", "TimeoutError")


def test_the_line_of_a_pools_worker_is_told(fasttrain: Any, script: Any, only_run_dir: Any) -> None:
    path = script(
        "from multiprocessing import Pool\n"
        "def look_up(key):\n"
        "    return {}[key]\n"
        "if __name__ == '__main__':\n"
        "    with Pool(1) as pool: pool.map(look_up, ['no key'])\n"
    )
    fasttrain("run", path)
    crash = crash_in(only_run_dir())
    assert crash["error"] == "KeyError: 'no key'"
    assert [(f["function"], f["line"]) for f in crash["frames"]] == [("look_up", 3)]


def test_a_module_that_lies_in_the_working_directory(
    fasttrain: Any, script: Any, only_run_dir: Any
) -> None:
    for folder in ("mylib", "tools", "wandb"):
        Path(fasttrain.cwd, folder).mkdir()
    script("", "mylib/__init__.py")
    script("import mylib, wandb", "tools/train.py")
    fasttrain("run", "tools/train.py", "--run-dir", "first")
    crash = crash_in(fasttrain.cwd / "first")
    assert crash["cause"] == "module-missing"
    assert "fasttrain run -m tools.train" in crash["fix"]
    assert "pip" not in crash["fix"]
    # The advice holds; and a folder that holds no module is none.
    for number, words in enumerate((("tools/train.py",), ("-m", "tools.train"))):
        env = {} if number else {"PYTHONPATH": "."}
        fasttrain("run", *words, "--run-dir", str(number), env=env)
        log = Path(fasttrain.cwd, str(number), "rank-0.log").read_text()
        assert "No module named 'mylib'" not in log
    script("import wandb_that_is_none", "tools/train.py")
    Path(fasttrain.cwd, "wandb_that_is_none").mkdir()
    fasttrain("run", "tools/train.py", "--run-dir", "last")
    assert "pip install" in crash_in(fasttrain.cwd / "last")["fix"]


def test_an_installed_program_is_the_users(fasttrain: Any, script: Any, only_run_dir: Any) -> None:
    package = Path(fasttrain.cwd, "site-packages", "program")
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "net.py").write_text("import json\ndef parse():\n    json.loads('[')\n")
    (package / "train.py").write_text("from program.net import parse\nparse()\n")
    fasttrain("run", "-m", "program.train", env={"PYTHONPATH": str(package.parent)})
    frames = [(Path(f["file"]).name, f["line"]) for f in crash_in(only_run_dir())["frames"]]
    assert frames[:2] == [("train.py", 2), ("net.py", 3)]
    assert len(frames) == 3, "of json, the innermost call alone"
