"""Prints what came of a training, to the last bit."""

import hashlib
import json

from torch import Tensor, nn


def tell(losses: list[float], model: nn.Module) -> None:
    """Print the losses and a digest of the weights on the last line."""
    weights = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        weights.update(name.encode() + _bytes(value))
    print(json.dumps({"losses": losses, "weights": weights.hexdigest()}))  # noqa: T201


def _bytes(value: Tensor) -> bytes:
    return bytes(value.detach().cpu().contiguous().flatten().float().numpy().tobytes())
