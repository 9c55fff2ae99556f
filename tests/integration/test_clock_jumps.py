"""The time of day is set while a run goes on: as the whole process sees it."""

from __future__ import annotations

import json
import re
from typing import Any

from fasttrain.model.codec import loads
from fasttrain.model.outcome import Receipt

IS_SET = """
import time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 13):
    if step == 6:
        real = time.time
        time.time = lambda: real() - 7200
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.15)
"""


def test_events_and_receipt_tell_of_it(fasttrain: Any, script: Any, only_run_dir: Any) -> None:
    done = fasttrain("run", script(IS_SET), "--device", "cpu", "--amp", "off")
    assert done.returncode == 0, done.stderr.decode()
    lines = (only_run_dir() / "events-0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    jumps = [event["clock_jump_s"] for event in events if "clock_jump_s" in event]
    assert [round(jump_s) for jump_s in jumps] == [-7200]
    times = [event["monotonic_s"] for event in events]
    assert times == sorted(times)
    receipt = loads(Receipt, (only_run_dir() / "receipt.json").read_bytes())
    (warning,) = receipt.warnings
    assert re.search(r"\b7,200 s\b.* step \d", warning)
    assert 0 < receipt.wall_s < 60
    assert 0 < receipt.ranks[0].stats.median_step_s < 5
    assert warning in " ".join(done.stderr.decode().split())
