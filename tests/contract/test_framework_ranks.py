"""Scripts that handle their ranks themselves train under fasttrain as they do under torchrun."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.outcome import State
from support.thinned import thinned

SCRIPTS = Path(__file__).parent / "frameworks"
LEVERS_OFF = (
    *("--amp", "off", "--optimizer", "keep", "--compile", "off", "--device", "cpu", "--quiet"),
)
# Each script with its own arguments and what shows that it handles ranks.
CASES = {
    "accelerate_loop": ((), "Accelerator"),
    "lightning_trainer": (("--devices", "2"), "lightning.Trainer"),
    "hf_trainer": ((), "transformers.Trainer"),
    "mmengine_runner": (("--launcher", "pytorch"), "mmengine.Runner"),
}

pytestmark = pytest.mark.slow


def trained(stdout: bytes) -> list[Any]:
    """Return what ranks told of their training in JSON; two of them may share a line."""
    told = re.findall(r'\{"losses".*?\}', stdout.decode())
    return [json.loads(each) for each in told]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", thinned(list(CASES), 0))
def test_ranks_of_a_framework_are_left_to_it(name: str, fasttrain: Any, tmp_path: Path) -> None:
    words, sign = CASES[name]
    script = SCRIPTS / f"{name}.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    plain = subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(script), *words],
        cwd=tmp_path, env=fasttrain.environ, capture_output=True, timeout=300,
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr.decode()
    done = fasttrain(
        "run", script, "--nproc-per-node", "2", *LEVERS_OFF, "--run-dir", tmp_path / "run",
        "--", *words, timeout_s=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    expected, found = trained(plain.stdout), trained(done.stdout)
    assert len(found) == 1, "rank 0 is shown"
    assert found[0] in expected
    assert len({rank["weights"] for rank in expected}) == 1, "the framework averages"
    for rank in json.loads((tmp_path / "run/receipt.json").read_text())["ranks"]:
        outcomes = {outcome["lever"]: outcome for outcome in rank["outcomes"]}
        assert "dataloader" not in outcomes
        assert outcomes["strategy"]["state"] == State.CEDED
        assert f" {sign} " in outcomes["strategy"]["reason"]
        assert rank["stats"]["steps"] > 0
