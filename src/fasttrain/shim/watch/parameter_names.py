"""Names a parameter as the script's model does, for messages."""

from __future__ import annotations

import gc

from torch import Tensor
from torch.nn import Module


def parameter_name(parameter: Tensor) -> str:
    """Give ``Model: layers.0.weight``, or the shape of a parameter that is in no module.

    It looks at every object there is, which takes a while.
    """
    best: tuple[int, str] = (0, f"a parameter of shape {tuple(parameter.shape)}")
    for holder in gc.get_objects():
        # Not isinstance: that would ask lazily loaded objects for their class.
        if not issubclass(type(holder), Module) or "_parameters" not in vars(holder):
            continue
        named = dict(Module.named_parameters(holder))
        names = [name for name, found in named.items() if found is parameter]
        if names and len(named) > best[0]:
            best = (len(named), f"{type(holder).__name__}: {names[0]}")
    return best[1]
