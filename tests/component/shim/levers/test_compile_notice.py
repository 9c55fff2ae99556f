"""What is being compiled is among the events while it goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

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
