"""The README's commands, run as a reader would: from a copy of the project and nothing else.

The second one, which sets up and runs these very tests, is what `.ci/run` calls.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def readme_commands(heading="Try it"):
    section = (ROOT / "README.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```sh\n(.+?)\n```", section, flags=re.DOTALL)


@pytest.fixture
def checkout(tmp_path):
    """Return a copy of what git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def run(command, cwd, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env={**clean, **environ}, capture_output=True, text=True
    )


def test_there_are_two_commands():
    assert len(readme_commands()) == 2


@pytest.mark.slow
@pytest.mark.runs
@pytest.mark.timeout(900)
def test_the_first_command_trains_and_shows_what_took_effect(checkout):
    # A quarter of its steps, and one of its layers: what is tested is all there by then.
    done = run(f"{readme_commands()[0]} -- --steps 80 --layers 1", checkout)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"^validation loss ([\d.]+)", done.stdout, re.MULTILINE)[1]) < 2.6
    # A CPU without bf16 leaves it off, with the reason.
    assert re.search(r"amp +(applied +bfloat16|skipped +\S)", done.stderr)
    assert int(re.search(r"compile +applied .*?([\d,]+) graphs", done.stderr, re.DOTALL)[1]) > 0
    assert re.search(r"optimizer +applied +fused", done.stderr)


def test_the_commands_for_ones_own_script_are_understood(fasttrain, tmp_path):
    (tmp_path / "train.py").write_text("")
    machine = ROOT / "tests/data/machines/8xh100.json"
    lines = readme_commands("Your own script")[0].splitlines()
    assert len(lines) == 7
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        assert program == "fasttrain"
        at = words.index("--") if "--" in words else len(words)
        words[at:at] = ["--dry-run"]
        if words[0] == "run":
            words[at:at] = ["--machine", str(machine)]
        done = fasttrain(*words)
        assert (done.returncode, done.stderr) == (0, b""), line
