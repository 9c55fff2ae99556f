"""The script for the first hour on a GPU: bash reads it, and its command line is checked."""

from __future__ import annotations

import signal
import subprocess
import tarfile
import time
import warnings
from pathlib import Path

import pytest

SECRET = "hunter2"
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "first_hour.sh"


def start(*words: str | Path, cwd: Path, path: str = "/usr/bin:/bin") -> tuple[int, str, str]:
    environ = {"PATH": path, "SOME_TOKEN": SECRET, "FASTTRAIN_AMP": SECRET}
    argv = [str(SCRIPT), *map(str, words)]
    done = subprocess.run(argv, cwd=cwd, env=environ, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_warning_that_cublas_may_give_fails_no_test() -> None:
    """All warnings are errors in tests; the words are those of aten/src/ATen/cuda, torch 2.13."""
    warnings.warn(
        "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the"
        " primary context... (Triggered internally at CublasHandlePool.cpp:335.)",
        UserWarning,
        stacklevel=1,
    )


def test_bash_accepts_it() -> None:
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_names_every_option(tmp_path: Path) -> None:
    code, out, err = start("--help", cwd=tmp_path)
    assert (code, err) == (0, "")
    for option in ("--minutes", "--out", "--torch", "--torch-index", "--python", "--rehearse"):
        assert f"  {option} " in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--minuts", "5"], "--minuts"),
        (["--minutes"], "--minutes"),
        (["--minutes", "an hour"], "an hour"),
        (["--minutes", "0"], "--minutes"),
        (["--python", "/not/there"], "--python"),
        (["--python", "/bin/sh", "--torch", "torch==2.9"], "--torch"),
        (["--python", "/bin/sh", "--out", "."], "--out"),
    ],
)
def test_what_it_does_not_understand_is_an_error(
    tmp_path: Path, words: list[str], named: str
) -> None:
    code, out, err = start(*words, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert named in err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return an interpreter for which all succeeds but the tests."""
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/bash\n"
        'echo "python $*"\n'
        'case "$*" in "-m pytest"*) exit 3 ;; esac\n'
    )  # fmt: skip
    program.chmod(0o755)
    return program


def test_a_part_that_fails_ends_no_other_and_all_is_packed(tmp_path: Path, python: Path) -> None:
    words = ("--rehearse", "--python", python, "--out", "there", "--minutes", "1")
    code, out, _ = start(*words, cwd=tmp_path)
    assert code == 1
    summary = (tmp_path / "there" / "results" / "summary.txt").read_text()
    assert summary in out
    rows = {line.split()[0]: line.split()[1:-1] for line in summary.splitlines()[1:]}
    assert rows["tests"] == rows["tests-compile"] == ["failed", "3"]
    parts = ("nvidia-smi", "torch", "doctor", "small", "gpt", "resnet50", "unet", "gpt-graphs")
    assert {part: rows[part] for part in parts} == {part: ["ok", "0"] for part in parts}
    (archive,) = (tmp_path / "there").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        files = {Path(f.name).name: packed.extractfile(f) for f in packed if f.isfile()}
        texts = {name: file.read().decode() for name, file in files.items() if file}
    assert {"summary.txt", "versions.txt", *(f"{part}.log" for part in rows)} == texts.keys()
    assert not any(SECRET in text for text in texts.values())


def test_without_torch_nothing_that_needs_it_is_run(tmp_path: Path, python: Path) -> None:
    python.write_text("#!/bin/bash\nexit 1\n")
    code, out, _ = start("--rehearse", "--python", python, "--out", "there", cwd=tmp_path)
    assert code == 1
    assert "not run" in next(line for line in out.splitlines() if line.startswith("doctor"))
    assert list((tmp_path / "there").glob("*.tar.gz"))


def test_a_part_ends_at_its_time_limit(tmp_path: Path, python: Path) -> None:
    """With all its processes: what a shell of the part's own has started, too."""
    python.write_text('#!/bin/bash\ncase "$*" in *doctor*) sleep 60; echo late ;; esac\n')
    words = ("--rehearse", "--python", python, "--out", "there", "--minutes", "1")
    code, out, _ = start(*words, cwd=tmp_path)
    assert code == 1
    row = next(line for line in out.splitlines() if line.startswith("doctor "))
    assert "stopped at its time limit" in row
    assert "124" in row
    assert "late" not in (tmp_path / "there" / "results" / "doctor.log").read_text()


def test_ctrl_c_ends_the_part_that_runs_and_packs_what_is_there(
    tmp_path: Path, python: Path
) -> None:
    python.write_text('#!/bin/bash\ncase "$*" in *doctor*) echo here; sleep 60 ;; esac\n')
    argv = [str(SCRIPT), "--rehearse", "--python", str(python), "--out", "there"]
    run = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "there" / "results" / "doctor.log"
    for _ in range(600):
        if log.exists() and log.read_text():
            break
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 130
    assert "not run" in next(line for line in out.splitlines() if line.startswith("tests "))
    assert list((tmp_path / "there").glob("*.tar.gz"))
