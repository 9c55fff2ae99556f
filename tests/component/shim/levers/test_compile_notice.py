"""What a compilation shows: events while it goes on, and nothing in the script's output."""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.model.outcome import State
from fasttrain.model.places import COMPILED_VARIABLE
from fasttrain.shim.levers.compile.account import Account
from support.rig import X, network, train


def events(runtime: Any) -> list[dict[str, Any]]:
    path = runtime._run_dir / "events-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_events_name_what_is_compiled(rig: Any, backend: Any) -> None:
    during: list[Any] = []

    def compiler(graph: Any, _: Any) -> Any:
        during.append(events(runtime)[-1]["compiling"])
        return graph

    with backend(compiler), rig(compile="default") as runtime:
        train(network())
        told = [event for event in events(runtime) if "compiling" in event]
    assert during == ["Sequential"]
    assert [event["compiling"] for event in told] == ["Sequential", ""]
    assert all("time_s" in event for event in told)
    handler = torch._dynamo.callback.callback_handler
    assert not handler.start_callbacks
    assert not handler.end_callbacks


def test_without_the_lever_there_are_none(rig: Any, backend: Any) -> None:
    with backend("eager"), rig(amp="bfloat16") as runtime:
        torch.compile(network())(X)
        assert not [event for event in events(runtime) if "compiling" in event]


def log(cache: Path) -> None:
    """Log as the compilers do, and as others."""
    locks = logging.getLogger("filelock")
    headers = Path(tempfile.gettempdir(), "torchinductor_me", "precompiled_headers", "a.lock")
    for place in (cache / "a.lock", headers, cache.parent / "own.lock"):
        locks.debug("Lock %s acquired on %s", 1, place)
    for name in ("torch._inductor.codecache", "torch._functorch._aot_autograd.x", "torch.x"):
        logging.getLogger(name).warning("logged by %s", name)
    logging.getLogger("torch._subclasses.fake_tensor").error("no operator takes that")


def test_what_compilers_log_stays_out_of_the_scripts_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    monkeypatch.setenv(COMPILED_VARIABLE, str(tmp_path / "cache"))
    with ExitStack() as undo:
        Account(undo)
        log(tmp_path / "cache")
    assert caplog.messages == [f"Lock 1 acquired on {tmp_path / 'own.lock'}", "logged by torch.x"]
    caplog.clear()
    log(tmp_path / "cache")
    assert len(caplog.messages) == 7, "all of it is there without the lever"


def test_torch_logs_turns_it_on_again(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TORCH_LOGS", "+inductor")
    monkeypatch.setenv(COMPILED_VARIABLE, str(tmp_path / "cache"))
    with ExitStack() as undo:
        Account(undo)
        log(tmp_path / "cache")
    assert len(caplog.messages) == 7


@pytest.mark.parametrize("logs", ["", "+inductor"])
def test_what_torch_warns_of_while_it_compiles_is_not_shown(
    rig: Any, backend: Any, monkeypatch: pytest.MonkeyPatch, logs: str
) -> None:
    names = ["torch.autograd.graph", "__main__"]

    def compiler(graph: Any, _: Any) -> Any:
        for name in names:
            warnings.warn_explicit(name, UserWarning, "file.py", 1, module=name)
        return graph

    if logs:
        monkeypatch.setenv("TORCH_LOGS", logs)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with backend(compiler), rig(compile="default"):
            train(network())
        compiler(None, None)
    told = [str(one.message) for one in shown if str(one.message) in names]
    assert told == [*(names if logs else names[1:]), *names]


def test_a_model_that_is_frozen_at_first_is_compiled_once_it_trains(rig: Any, backend: Any) -> None:
    with backend("eager"), rig(compile="default") as runtime:
        model = network().requires_grad_(False)
        model(X)
        assert runtime.outcomes()["compile"].counts.get("graphs", 0) == 0
        train(model.requires_grad_(True))
        outcome = runtime.outcomes()["compile"]
    assert outcome.state is State.APPLIED
    assert outcome.counts["graphs"] == 1
