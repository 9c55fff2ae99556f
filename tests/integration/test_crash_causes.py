"""Real failures of one process: what crash.json and the card say of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.crash.cause_rules import AT_LIMIT, LARGEST
from fasttrain.shim.script import NOT_RECORDED

CAUSES = {
    "assertion": (1, "assert 1 + 1 == 3, 'sums'"),
    "module-missing": (1, "import no_such_module"),
    "import-failed": (1, "from json import no_such_name"),
    "syntax": (1, "exec('1 +')"),
    "file-missing": (1, "open('no-such-file')"),
    "disk-full": (1, "open('/dev/full', 'w', buffering=1).write('all of it\\n')"),
    "host-memory": (
        1,
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "bytearray(1 << 32)",
    ),
    "too-many-files": (
        1,
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "files = [open('/dev/null') for _ in range(99)]",
    ),
    "port-in-use": (
        1,
        "import socket\n"
        "first, second = socket.socket(), socket.socket()\n"
        "first.bind(('127.0.0.1', 0))\n"
        "second.bind(first.getsockname())",
    ),
    "checkpoint-broken": (1, "import pickle; pickle.loads(b'<html>')"),
    "pickling": (1, "import pickle; pickle.dumps(lambda: 0)"),
    "recursion": (1, "def again(): again()\nagain()"),
    "interrupted": (130, "raise KeyboardInterrupt"),
    "usage": (2, "import argparse; argparse.ArgumentParser().parse_args(['--no-such'])"),
    "exit": (3, "import sys; sys.exit(3)"),
    "exception": (1, "{}['no such key']"),
    "killed": (137, "import os; os.kill(os.getpid(), 9)"),
    "segfault": (139, "import ctypes; ctypes.string_at(0)"),
    "aborted": (134, "import os; os.abort()"),
    "bus-error": (
        135,
        "import mmap\n"
        "with open('cut', 'wb+') as file:\n"
        "    file.write(b'x' * 8192); file.flush()\n"
        "    mapped = mmap.mmap(file.fileno(), 8192); file.truncate(0)\n"
        "mapped[4096]",
    ),
    "arithmetic": (136, "import os, signal; os.kill(os.getpid(), signal.SIGFPE)"),
    "stopped": (143, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_real_failure(fasttrain: Any, script: Any, only_run_dir: Any, cause: str) -> None:
    code, text = CAUSES[cause]
    done = fasttrain("run", script(text))
    assert done.returncode == code, done.stderr
    crash = json.loads((only_run_dir() / "crash.json").read_text())
    assert (crash["cause"], crash["exit_code"]) == (cause, code)
    assert crash["signal"] == (signal.Signals(code - 128).name if code > 128 else "")
    receipt = json.loads((only_run_dir() / "receipt.json").read_text())
    assert receipt["crash"] == crash
    said = done.stderr.decode().splitlines()
    end, begin = (i for i in reversed(range(len(said))) if said[i].startswith("fasttrain: "))
    assert re.search(rf"\bexit code {code}\b", said[end]), "the receipt stands behind the card"
    assert end - begin <= 6
    assert max(map(len, said[begin:end])) <= 80
    # Whatever Python said of it stands there once.
    assert done.stderr.count(b"Traceback") == ("Traceback" in _log(only_run_dir()))


def _log(run_dir: Path) -> str:
    return (run_dir / "rank-0.log").read_text().replace("During handling", "")


@pytest.mark.parametrize("code", [128, 193, 255])
def test_a_code_beyond_all_signals_is_the_scripts_own(
    fasttrain: Any, script: Any, only_run_dir: Any, code: int
) -> None:
    assert fasttrain("run", script(f"import os; os._exit({code})")).returncode == code
    receipt = json.loads((only_run_dir() / "receipt.json").read_text())
    crash = receipt["crash"]
    assert (crash["cause"], crash["exit_code"], crash["signal"]) == ("exit", code, "")


HANDLED = """
import os, traceback
try:
    import no_such_module
except ImportError:
    traceback.print_exc()
print("going on without it", flush=True)
os._exit(1)
"""


def test_a_traceback_of_what_was_handled_is_no_cause(
    fasttrain: Any, script: Any, only_run_dir: Any
) -> None:
    assert fasttrain("run", script(HANDLED)).returncode == 1
    assert json.loads((only_run_dir() / "crash.json").read_text())["cause"] == "exit"
    fasttrain(
        "run",
        script(HANDLED.replace('print("going', '("going').replace(", flush=True", "")),
        "--run-dir",
        "last",
    )
    crash = json.loads(Path(fasttrain.cwd, "last", "crash.json").read_text())
    assert crash["cause"] == "module-missing"


def test_what_ended_the_script_behind_its_own_error(
    fasttrain: Any, script: Any, only_run_dir: Any
) -> None:
    path = script(
        "import sys\n"
        "try:\n    open('data.csv')\n"
        "except Exception as error:\n    print('no data'); sys.exit(4)\n"
    )
    assert fasttrain("run", path).returncode == 4
    crash = json.loads((only_run_dir() / "crash.json").read_text())
    assert (crash["cause"], crash["exit_code"]) == ("file-missing", 4)
    assert "data.csv" in crash["why"]


def test_the_stack_of_a_fatal_signal(fasttrain: Any, script: Any, only_run_dir: Any) -> None:
    path = script("import ctypes\ndef reach():\n    ctypes.string_at(0)\nreach()")
    done = fasttrain("run", path)
    crash = json.loads((only_run_dir() / "crash.json").read_text())
    own = [(Path(f["file"]).name, f["line"], f["function"]) for f in crash["frames"][:-1]]
    assert own == [("train.py", 4, "<module>"), ("train.py", 3, "reach")]
    assert "train.py:3" in crash["why"]
    assert "train.py:3" in done.stderr.decode()


def test_a_script_that_enables_faulthandler_gets_its_stack_itself(
    fasttrain: Any, script: Any, only_run_dir: Any
) -> None:
    path = script("import ctypes, faulthandler\nfaulthandler.enable()\nctypes.string_at(0)")
    done = fasttrain("run", path)
    assert b"Fatal Python error: Segmentation fault" in done.stderr
    assert not list(only_run_dir().glob("fault-*"))


def test_a_good_run_leaves_no_trace_of_it(fasttrain: Any, script: Any, only_run_dir: Any) -> None:
    assert fasttrain("run", script("print(1)")).returncode == 0
    names = {path.name for path in only_run_dir().iterdir()}
    assert names == {"plan.json", "receipt.json", "rank-0.log", "launcher.lock"}


def test_the_scripts_files_keep_their_numbers(fasttrain: Any, script: Any) -> None:
    path = script("print(open('/dev/null').fileno())")
    assert fasttrain("run", path, "--quiet").stdout == b"3\n"


def test_a_fork_of_the_script_is_not_the_worker(
    fasttrain: Any, script: Any, only_run_dir: Any
) -> None:
    path = script("import os\nif not os.fork(): raise ValueError('of the child')\nos.wait()")
    assert fasttrain("run", path).returncode == 0
    assert not list(only_run_dir().glob("failure-*"))


def test_a_failure_that_cannot_be_recorded_is_told(fasttrain: Any, script: Any) -> None:
    text = "import os\nkept = 'run/failure-0.json.tmp'\nos.unlink(kept); os.mkdir(kept)\n{}['key']"
    done = fasttrain("run", script(text), "--run-dir", "run")
    assert done.returncode == 1
    assert NOT_RECORDED.encode() in done.stderr
    # The launcher takes it from the log instead.
    assert re.search(rb"(?m)^fasttrain: .*\bexit code 1: KeyError: 'key'", done.stderr)


def test_quiet_adds_nothing_to_what_python_prints(fasttrain: Any, script: Any) -> None:
    done = fasttrain("run", script("import sys; sys.exit('its last word')"), "--quiet")
    assert (done.returncode, done.stderr) == (1, b"its last word\n")


def test_report_shows_all_of_it(fasttrain: Any, script: Any) -> None:
    path = script("print('loading')\nopen('no-such-file')")
    fasttrain("run", path)
    told = fasttrain("report").stderr.decode()
    assert "[file-missing]" in told
    for part in ("train.py:2 in <module>", "FileNotFoundError", "| loading"):
        assert part in told
    data = json.loads(fasttrain("report", "--json").stdout)["data"]
    assert data["crash"]["cause"] == "file-missing"


def test_a_command_is_judged_by_its_log(fasttrain: Any, only_run_dir: Any) -> None:
    words = ("run", "--no-python", sys.executable, "--", "-c", "import no_such_module")
    assert fasttrain(*words).returncode == 1
    crash = json.loads((only_run_dir() / "crash.json").read_text())
    assert (crash["cause"], "no_such_module" in crash["why"]) == ("module-missing", True)


def test_secrets_stay_out_of_it(fasttrain: Any, script: Any, only_run_dir: Any) -> None:
    path = script(
        "import os, sys\n"
        "token = os.environ['HF_TOKEN']\n"
        "def get(url='/from-flag'): raise ValueError(f'403 for {token} and {sys.argv[2]}')\n"
        "print('logged in with', token)\n"
        "get()\n"
    )
    options = ("--api-key", "from-flag")
    done = fasttrain("run", path, "--", *options, env={"HF_TOKEN": "hf_abcdef"})
    assert done.returncode == 1
    kept = [
        file.name
        for file in only_run_dir().iterdir()
        # The script printed them itself into its log.
        if any(word in file.read_bytes() for word in (b"hf_abcdef", b"from-flag"))
    ]
    assert kept == ["rank-0.log"]
    told = fasttrain("report").stderr.decode()
    assert "403 for *** and ***" in told
    assert "| logged in with ***" in told
    assert "hf_abcdef" not in told


def test_the_kernel_kills_for_memory(
    fasttrain: Any, script: Any, only_run_dir: Any, memory_group: Any
) -> None:
    path = script("held = []\nwhile True: held.append(b'x' * (16 << 20))")
    process = fasttrain.start("run", path, "--quiet", preexec_fn=memory_group(192 << 20))
    assert process.wait(120) == 137
    crash = json.loads((only_run_dir() / "crash.json").read_text())
    assert (crash["cause"], crash["signal"]) == ("host-memory", "SIGKILL")
    assert f"{AT_LIMIT}, 192 MiB" in crash["why"]
    assert f"{LARGEST} 1" in crash["why"]


def test_what_the_kernel_kills_for_memory_elsewhere_is_not_this_run(
    fasttrain: Any, script: Any, until: Any, only_run_dir: Any, memory_group: Any, tmp_path: Path
) -> None:
    path = script(
        "import os, pathlib, signal, time\n"
        "pathlib.Path('ready').touch()\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = fasttrain.start("run", path, "--quiet", preexec_fn=memory_group(2 << 30))
    until((tmp_path / "ready").exists)
    hog = "held = []\nwhile True: held.append(b'x' * (16 << 20))"
    other = subprocess.run([sys.executable, "-c", hog], preexec_fn=memory_group(64 << 20))
    assert other.returncode == -signal.SIGKILL
    (tmp_path / "go").touch()
    assert process.wait(120) == 137
    crash = json.loads((only_run_dir() / "crash.json").read_text())
    assert (crash["cause"], crash["signal"]) == ("killed", "SIGKILL")
