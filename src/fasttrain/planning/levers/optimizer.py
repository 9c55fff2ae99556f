"""Decides the optimizer implementation."""

from __future__ import annotations

from fasttrain.model.decision import Decision, Setting
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import OptimizerChoice, OptimizerMode
from fasttrain.model.machine import Machine
from fasttrain.model.vendors import VENDORS, DeviceKind
from fasttrain.planning.describe import TORCH, asked, machine_phrase, release, torch_phrase
from fasttrain.planning.levers.all import Situation


def decide(situation: Situation) -> Decision[OptimizerMode]:
    """Return fused where torch has such kernels for the device, npu on NPUs, else the script's own.

    Raises:
        FasttrainError: ``optimizer-fused`` or ``optimizer-npu``.
    """
    setting = situation.settings.optimizer
    return _DECIDERS[setting.value](setting, situation.machine, situation.chosen.kind)


def _auto(
    _setting: Setting[OptimizerChoice], machine: Machine, kind: DeviceKind
) -> Decision[OptimizerMode]:
    vendor = VENDORS[kind]
    if vendor.own_optimizers:
        reason = f"{vendor.extension} has fused optimizers that compute the same"
        return Decision(vendor.own_optimizers, reason, TORCH)
    if why_not := _why_not_fused(machine, kind):
        return Decision("keep", why_not, TORCH)
    return Decision("fused", f"{torch_phrase(machine)} has fused optimizers on {kind}", TORCH)


def _keep(
    setting: Setting[OptimizerChoice], _machine: Machine, _kind: DeviceKind
) -> Decision[OptimizerMode]:
    return Decision("keep", asked(setting), setting.source)


def _fused(
    setting: Setting[OptimizerChoice], machine: Machine, kind: DeviceKind
) -> Decision[OptimizerMode]:
    if why_not := _why_not_fused(machine, kind):
        raise FasttrainError(
            f"fused optimizers were asked for, but {kind} has none here",
            why=why_not,
            fix="use --optimizer keep, or auto",
            slug="optimizer-fused",
        )
    return Decision("fused", asked(setting), setting.source)


def _npu(
    setting: Setting[OptimizerChoice], machine: Machine, kind: DeviceKind
) -> Decision[OptimizerMode]:
    if VENDORS[kind].own_optimizers != "npu":
        raise FasttrainError(
            "--optimizer npu was asked for, but the run is not on NPUs",
            why=f"the run is on {kind}, and this machine has {machine_phrase(machine)}",
            fix="use --optimizer fused, or auto",
            slug="optimizer-npu",
        )
    return Decision("npu", asked(setting), setting.source)


_DECIDERS = {"auto": _auto, "keep": _keep, "fused": _fused, "npu": _npu}


def _why_not_fused(machine: Machine, kind: DeviceKind) -> str:
    since = VENDORS[kind].fused_since
    if since is None:
        return f"torch's fused optimizers are not used on {kind}"
    if machine.torch.release < since:
        return f"fused on {kind} needs {release(since)}, and there is {torch_phrase(machine)}"
    return ""
