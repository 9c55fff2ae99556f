"""Whole training loops under the levers, against their twins: written by hand, or without levers.

A loop in ``loops/`` calls its models through ``call`` and makes its optimizers with ``fused``: the
twin by hand passes autocast around a call, and True.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.model.outcome import State
from support.command import NO_BF16_LSTM
from support.rig import backend, rig

# dynamo warns while it compiles; here that would be an error inside the compiler
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

LOOPS = Path(__file__).parent / "loops"
# Calls of roots that the loop makes, counted by hand, and the modules that it trains.
CALLS = {
    "gan": 20 * 4,
    "parts": 20 * 3 + 17,
    "teacher": 20 * 3 + 1 + 3,
    "thrifty": 40,
    "recurrent": 20,
}
TRAINED = {"gan": 2, "parts": 4, "teacher": 2, "thrifty": 1, "closures": 1}


def loop(name: str, **given: Any) -> dict[str, Any]:
    return runpy.run_path(str(LOOPS / f"{name}.py"), init_globals=given)


def by_hand(module: Any, *args: Any) -> Any:
    """Call a module as a person would who wants bf16 inside and fp32 outside."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(*args)
    return in_fp32(output)


def in_fp32(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.float()
    if isinstance(output, dict):
        return {name: in_fp32(part) for name, part in output.items()}
    return tuple(in_fp32(part) for part in output)


def bce_by_hand(chance: torch.Tensor, target: torch.Tensor, **_: Any) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return RAW_BCE(chance.float(), target.float())


RAW_BCE = torch.nn.functional.binary_cross_entropy


@pytest.mark.parametrize("name", CALLS)
def test_bf16_and_fused_are_the_twin_by_hand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loop(name)
    with rig(amp="bfloat16", optimizer="fused") as runtime:
        found = loop(name)
        outcomes = runtime.outcomes()
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "binary_cross_entropy", bce_by_hand)
        try:
            expected = loop(name, call=by_hand, fused=True)
        except RuntimeError as error:
            if NO_BF16_LSTM not in str(error):
                raise
            assert found["losses"] == loop(name, fused=True)["losses"]  # the calls are repeated
            return
    assert found["losses"] == expected["losses"]
    assert found["losses"] != plain["losses"]
    assert found["result"].keys() == expected["result"].keys()
    for key, value in expected["result"].items():
        assert torch.equal(found["result"][key], value), key
    assert outcomes["amp"].counts["forwards"] == CALLS[name]
    assert outcomes["amp"].state is outcomes["optimizer"].state is State.APPLIED


def test_bf16_where_no_optimizer_can_be_fused() -> None:
    with rig(amp="bfloat16", optimizer="fused") as runtime:
        found = loop("closures")
        outcomes = runtime.outcomes()
    expected = loop("closures", call=by_hand)
    assert found["losses"] == expected["losses"]
    assert outcomes["amp"].state is State.APPLIED
    assert outcomes["optimizer"].state is State.SKIPPED


@pytest.mark.parametrize("name", TRAINED)
def test_compiled_loops_give_the_same_losses(name: str) -> None:
    plain = loop(name)
    with backend("aot_eager"), rig(compile="default") as runtime:
        found = loop(name)
        outcome = runtime.outcomes()["compile"]
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    for key, value in plain["result"].items():
        torch.testing.assert_close(found["result"][key], value, rtol=1e-3, atol=1e-5)
    assert not [key for key in found["result"] if "_orig_mod" in key]
    assert outcome.state is State.APPLIED
    assert outcome.counts["targets"] == TRAINED[name]
    assert outcome.counts["graphs"] >= TRAINED[name]
    assert (outcome.counts["failures"], outcome.counts["limits"]) == (0, 0)


def test_a_model_that_dynamo_leaves_alone_runs_eagerly_and_says_so() -> None:
    plain = loop("recurrent")
    with backend("aot_eager"), rig(compile="default") as runtime:
        found = loop("recurrent")
        outcome = runtime.outcomes()["compile"]
    assert found["losses"] == plain["losses"]
    assert (outcome.state, outcome.counts["graphs"]) == (State.FAILED, 0)
    assert "LSTM" in outcome.reason
    assert any("recurrent.py:18" in note for note in outcome.notes)


@pytest.mark.parametrize("name", ["gan", "teacher"])
def test_all_levers_together(name: str) -> None:
    with rig(amp="bfloat16", optimizer="fused") as runtime:
        eager = loop(name)
    with backend("aot_eager"), rig(
        amp="bfloat16", compile="default", optimizer="fused", matmul="high"
    ) as runtime:  # fmt: skip
        found = loop(name)
        states = {name: outcome.state for name, outcome in runtime.outcomes().items()}
    assert set(states.values()) == {State.APPLIED}
    assert found["losses"] == pytest.approx(eager["losses"], rel=2e-2)  # bf16 has 8 bits
