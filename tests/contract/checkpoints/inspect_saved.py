# ruff: noqa: T201
"""Tells of each folder what a person who has only torch finds in it, one JSON line per folder.

python inspect_saved.py DIR...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import nets
import torch
from train import batch_of


@torch.no_grad()
def outputs_of(model: torch.nn.Module) -> list[list[float]]:
    return model.eval()(batch_of(-1)[0]).tolist()


def from_weights(state: dict[str, Any]) -> torch.nn.Module:
    model = nets.Net()
    model.load_state_dict(state)
    return model


def findings(folder: Path) -> dict[str, Any]:
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    found: dict[str, Any] = {}
    for name in ("model", "ema"):
        whole = torch.load(folder / f"{name}.pt", weights_only=False)
        found[name] = {
            "type": f"{type(whole).__module__}.{type(whole).__qualname__}",
            "attributes": sorted(vars(whole)),
            "whole": outputs_of(whole),
            "from weights": outputs_of(from_weights(checkpoint[name])),
        }
    return found


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(findings(Path(argument))))
    print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "fasttrain"]))
