"""Lists the optimizers that torch_npu's fused ones can replace, and finds reasons why not.

Source: torch_npu/optim/*.py of the wheels 2.1.0.post8 to 2.14.0, which are the same code; adamp
0.3.0, timm 1.0.31, torch_optimizer 0.3.0 and pytorch_pretrained_bert 0.6.2, compared with them over
20 steps on a simulated device. Nothing of it has run on a card.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Arguments that choose torch's implementation, and the values that leave the choice to torch.
_TORCH = {
    "maximize": (False,),
    "foreach": (None,),
    "fused": (None,),
    "capturable": (False,),
    "differentiable": (False,),
}
_TIMM = {
    "caution": (False,),
    "foreach": (None,),
    "decoupled_decay": (False,),
    "corrected_weight_decay": (False,),
}
# The variants of NC1HWC0, FRACTAL_Z and FRACTAL_NZ, which order or pad a tensor in their own way.
# Source: torch_npu/npu/_format.py, torch_npu 2.13.0
_PRIVATE_FORMATS = {3, 4, 12, 29, 32, 33, *range(50, 55)}
_ADAM = ("lr", "betas", "eps", "weight_decay")
_MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_RMSPROP = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")
_RMSPROP_STATE = {
    "square_avg": "square_avg",
    "momentum_buffer": "momentum_buffer",
    "grad_avg": "grad_avg",
}
_RMSPROP_CONDITIONS = {"momentum_buffer": "momentum", "grad_avg": "centered"}


NONE_FUSED = "torch_npu has no fused one for it"
NOT_CONTIGUOUS = "a parameter is not contiguous"
PART = "a parameter is a part of a larger memory"
SHARED = "two parameters share their memory"


@dataclass(frozen=True, slots=True)
class Counterpart:
    """The fused optimizer that computes the same as an optimizer of a script.

    Attributes:
        fused: Its class in ``torch_npu.optim``.
        arguments: Entries of a parameter group that it takes under the same name.
        buffers: Keys of the script's optimizer state, and the fused one's names for them.
        fixed: Entries of a group that it lacks, each with the values that have no effect.
        ignored: Entries of a group that matter only if one of `fixed` has a value that is refused.
        attributes: Attributes of the script's optimizer and the values that they must have.
        constants: Arguments of the fused optimizer that don't depend on the script's.
        conditions: Keys of buffers that exist only if an argument is true, and that argument.
        records: Keys of the script's state that its step writes and never reads.
        schedule: Entry of a group whose ``get_lr(step)`` scales the learning rate; empty if none.
        differs: Why no setting of it computes the same; empty if some do.
    """

    fused: str
    arguments: tuple[str, ...]
    buffers: Mapping[str, str]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    records: tuple[str, ...] = ()
    schedule: str = ""
    differs: str = ""

    def present(self, group: Mapping[str, Any]) -> list[str]:
        """Return the keys of the buffers that a parameter of this group has."""
        conditions = self.conditions
        return [k for k in self.buffers if k not in conditions or group[conditions[k]]]


_ADAMP = Counterpart(
    "NpuFusedAdamP",
    (*_ADAM, "delta", "wd_ratio", "nesterov"),
    _MOMENTS,
    fixed={"caution": (False,)},
)

COUNTERPARTS: dict[str, Counterpart] = {
    "torch.optim.sgd.SGD": Counterpart(
        "NpuFusedSGD",
        ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        {"momentum_buffer": "momentum_buffer"},
        fixed=_TORCH,
        conditions={"momentum_buffer": "momentum"},
    ),
    "torch.optim.adam.Adam": Counterpart(
        "NpuFusedAdam",
        (*_ADAM, "amsgrad"),
        {**_MOMENTS, "max_exp_avg_sq": "max_exp_avg_sq"},
        fixed={**_TORCH, "decoupled_weight_decay": (False,)},
        conditions={"max_exp_avg_sq": "amsgrad"},
    ),
    "torch.optim.adamw.AdamW": Counterpart(
        "NpuFusedAdamW",
        (*_ADAM, "amsgrad"),
        {**_MOMENTS, "max_exp_avg_sq": "max_exp_avg_sq"},
        fixed={**_TORCH, "decoupled_weight_decay": (True,)},
        conditions={"max_exp_avg_sq": "amsgrad"},
    ),
    "torch.optim.adadelta.Adadelta": Counterpart(
        "NpuFusedAdadelta",
        ("lr", "rho", "eps", "weight_decay"),
        {"square_avg": "square_avg", "acc_delta": "acc_delta"},
        fixed=_TORCH,
    ),
    "torch.optim.rmsprop.RMSprop": Counterpart(
        "NpuFusedRMSprop",
        _RMSPROP,
        _RMSPROP_STATE,
        fixed=_TORCH,
        conditions=_RMSPROP_CONDITIONS,
    ),
    "timm.optim.rmsprop_tf.RMSpropTF": Counterpart(
        "NpuFusedRMSpropTF",
        (*_RMSPROP, "lr_in_momentum"),
        _RMSPROP_STATE,
        # Decoupled, torch_npu shrinks a weight by wd, and timm by lr * wd.
        fixed=_TIMM,
        ignored=("max_lr_snapshot",),
        conditions=_RMSPROP_CONDITIONS,
    ),
    "adamp.adamp.AdamP": _ADAMP,
    "timm.optim.adamp.AdamP": _ADAMP,
    "torch_optimizer.adamp.AdamP": _ADAMP,
    "torch_optimizer.lamb.Lamb": Counterpart(
        "NpuFusedLamb",
        _ADAM,
        _MOMENTS,
        attributes={"clamp_value": 10, "adam": False, "debias": False},
        records=("weight_norm", "adam_norm", "trust_ratio"),
    ),
    "timm.optim.lamb.Lamb": Counterpart(
        "NpuFusedLamb",
        _ADAM,
        _MOMENTS,
        differs="NpuFusedLamb takes a weight's norm as 10 at most, and timm's Lamb doesn't",
    ),
    "pytorch_pretrained_bert.optimization.BertAdam": Counterpart(
        "NpuFusedBertAdam",
        ("lr", "b1", "b2", "e", "weight_decay"),
        {"next_m": "exp_avg", "next_v": "exp_avg_sq"},
        # BertAdam clips each parameter, and torch_npu all of a group together.
        fixed={"max_grad_norm": (-1, 0)},
        constants={"max_grad_norm": -1},
        # torch_npu's own schedules lack some of its, and warmup_cosine fails in them.
        schedule="schedule",
    ),
}


def counterpart_of(kind: type[Optimizer]) -> Counterpart | None:
    """Return the fused counterpart of this very class; a subclass may compute anything."""
    return COUNTERPARTS.get(f"{kind.__module__}.{kind.__qualname__}")


def why_not(optimizer: Optimizer) -> str:
    """Return why no fused optimizer can replace an optimizer as it is now; empty if one can.

    Only parameters with a gradient count: a step doesn't change the others.
    """
    counterpart = counterpart_of(type(optimizer))
    if counterpart is None:
        return NONE_FUSED
    return counterpart.differs or next(_reasons(optimizer, counterpart), "")


def why_not_now(optimizer: Optimizer) -> str:
    """Return what the script has set since that the fused optimizer lacks; empty if nothing."""
    counterpart = COUNTERPARTS[f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"]
    groups = optimizer.param_groups
    return next((r for group in groups for r in _group_reasons(group, counterpart)), "")


def _reasons(optimizer: Optimizer, counterpart: Counterpart) -> Iterator[str]:
    for name, value in counterpart.attributes.items():
        if getattr(optimizer, name, value) != value:
            yield f"{counterpart.fused} has no {name}={getattr(optimizer, name)}"
    for group in optimizer.param_groups:
        yield from _group_reasons(group, counterpart)
    known = {*counterpart.arguments, *counterpart.fixed, *counterpart.ignored, counterpart.schedule}
    # torch adds a default `differentiable` to every optimizer that it unpickles or loads.
    for name in sorted(set(optimizer.defaults) - known - {"differentiable"}):
        yield f"{counterpart.fused} has nothing like its {name}"
    yield from _parameter_reasons(optimizer)


def _group_reasons(group: Mapping[str, Any], counterpart: Counterpart) -> Iterator[str]:
    for name, neutral in counterpart.fixed.items():
        value = group.get(name, neutral[0])
        if not any(value is one or value == one for one in neutral):
            yield f"{counterpart.fused} has no {name}={value}"
    for name in counterpart.arguments:
        value = group[name]
        if any(isinstance(v, Tensor) for v in (value if isinstance(value, tuple) else (value,))):
            yield f"its {name} is a tensor"


def _parameter_reasons(optimizer: Optimizer) -> Iterator[str]:
    storages: set[int] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield from _tensor_reasons(parameter, storages)


def on_device(device: object) -> str:
    """Return the reason for a parameter that is on another device than an NPU."""
    return f"a parameter is on {device}"


def _tensor_reasons(parameter: Tensor, storages: set[int]) -> Iterator[str]:
    """Yield reasons why a parameter can't be moved into a flat buffer."""
    if type(parameter) not in (Tensor, nn.Parameter):
        yield f"a parameter is a {type(parameter).__name__}"
        return
    if parameter.dtype not in (torch.float32, torch.float16):
        yield f"a parameter is {str(parameter.dtype).removeprefix('torch.')}"
    if parameter.grad is not None and parameter.grad.is_sparse:
        yield "its gradients are sparse"
    if not parameter.is_contiguous():
        yield NOT_CONTIGUOUS
    if _has_private_format(parameter):
        yield "a parameter is in a private format"
    storage = parameter.untyped_storage()
    # Such as the parameters of FSDP, which are parts of one storage
    if storage.nbytes() != parameter.numel() * parameter.element_size():
        yield PART
    elif storage.nbytes() and storage.data_ptr() in storages:
        yield SHARED
    storages.add(storage.data_ptr())
    if parameter.device.type != "npu":
        yield on_device(parameter.device)


def _has_private_format(parameter: Tensor) -> bool:
    torch_npu: Any = sys.modules.get("torch_npu")
    return torch_npu is not None and int(torch_npu.get_npu_format(parameter)) in _PRIVATE_FORMATS
