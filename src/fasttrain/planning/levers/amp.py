"""Decides mixed precision."""

from __future__ import annotations

from fasttrain.model.decision import Decision, Setting
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import Amp, AmpChoice
from fasttrain.model.machine import Machine
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.describe import CPU_CORES, DEVICES, and_join, device_names
from fasttrain.planning.gpus import ChosenDevices, Slot
from fasttrain.planning.levers.situation import Situation

MAY_SATURATE = "may saturate"
SATURATES = "saturates"


def decide(situation: Situation) -> Decision[Amp]:
    """Return the autocast dtype: bfloat16 where every device has it natively, else none.

    Raises:
        FasttrainError: ``amp-unsupported`` for a precision that an accelerator lacks,
            ``amp-fp16`` on devices where its loss scaling isn't known to be right.
    """
    setting = situation.settings.amp
    return _DECIDERS[setting.value](setting, situation.machine, situation.chosen)


def _auto(_setting: Setting[AmpChoice], machine: Machine, chosen: ChosenDevices) -> Decision[Amp]:
    if chosen.kind == "cpu":
        if machine.cpu.bf16:
            return Decision(Amp("bfloat16", "cpu"), "this CPU has native bf16", CPU_CORES)
        needs = VENDORS["cpu"].bf16_needs
        return Decision(Amp("off", "cpu"), f"this CPU has no native bf16 ({needs})", CPU_CORES)
    if lacking := _lacking(chosen):
        names = device_names(slot.device for slot in lacking)
        return Decision(Amp("off", chosen.kind), f"no native bf16 on {names}", DEVICES)
    reason = f"native bf16 on {device_names(chosen.devices)}"
    return Decision(Amp("bfloat16", chosen.kind), reason, DEVICES)


def _off(setting: Setting[AmpChoice], _machine: Machine, chosen: ChosenDevices) -> Decision[Amp]:
    return Decision(Amp("off", chosen.kind), f"asked for by {setting.source}", setting.source)


def _bf16(setting: Setting[AmpChoice], machine: Machine, chosen: ChosenDevices) -> Decision[Amp]:
    if lacking := _lacking(chosen):
        raise _unsupported("bf16", VENDORS[chosen.kind].bf16_needs, lacking, chosen)
    reason = f"asked for by {setting.source}"
    if chosen.kind == "cpu" and not machine.cpu.bf16:
        reason += "; emulated on this CPU, slower than fp32"
    return Decision(Amp("bfloat16", chosen.kind), reason, setting.source)


def _fp16(setting: Setting[AmpChoice], _machine: Machine, chosen: ChosenDevices) -> Decision[Amp]:
    if not VENDORS[chosen.kind].loss_scaling:
        raise FasttrainError(
            f"fp16 was asked for, but not on {chosen.kind} devices yet",
            why="its loss scaling relies on how overflow shows there, which is not verified",
            fix="use --amp bf16 or --amp off",
            slug="amp-fp16",
        )
    if lacking := tuple(slot for slot in chosen.slots if not slot.device.fp16):
        raise _unsupported("fp16", "compute capability 5.3", lacking, chosen)
    if saturating := _saturating(chosen):
        raise _unscalable(saturating, chosen)
    reason = f"asked for by {setting.source}"
    if chosen.kind == "cpu":
        reason += "; emulated on the CPU, slower than fp32"
    return Decision(Amp("float16", chosen.kind), reason, setting.source)


_DECIDERS = {"auto": _auto, "off": _off, "bf16": _bf16, "fp16": _fp16}


def _lacking(chosen: ChosenDevices) -> tuple[Slot, ...]:
    return tuple(slot for slot in chosen.slots if not slot.device.bf16)


def _saturating(chosen: ChosenDevices) -> tuple[Slot, ...]:
    """Return the devices that are not known to give inf where fp16 overflows."""
    if not VENDORS[chosen.kind].may_saturate:
        return ()
    return tuple(slot for slot in chosen.slots if slot.device.overflow != "inf")


def _unsupported(
    precision: str, needs: str, lacking: tuple[Slot, ...], chosen: ChosenDevices
) -> FasttrainError:
    scales = VENDORS[chosen.kind].loss_scaling and not _saturating(chosen)
    fp16 = precision == "bf16" and scales and all(slot.device.fp16 for slot in lacking)
    return FasttrainError(
        f"{precision} was asked for, but {_named(lacking, chosen)} can't do it",
        why=f"{precision} needs {needs}{_this_has(lacking)}",
        fix=f"use {'--amp fp16' if fp16 else '--amp off'}{_or_without(lacking, chosen)}",
        slug="amp-unsupported",
    )


def _unscalable(saturating: tuple[Slot, ...], chosen: ChosenDevices) -> FasttrainError:
    unknown = any(not slot.device.overflow for slot in saturating)
    how = MAY_SATURATE if unknown else SATURATES if len(saturating) == 1 else "saturate"
    use = "--amp off" if any(not slot.device.bf16 for slot in chosen.slots) else "--amp bf16"
    return FasttrainError(
        f"fp16 was asked for, but {_named(saturating, chosen)} {how} where it overflows",
        why="loss scaling skips the steps whose gradients hold inf, and there they hold fp16's"
        " largest number",
        fix=f"use {use}{_or_without(saturating, chosen)}; or write torch_npu.npu.amp's autocast"
        " and GradScaler, which ask the chip, into the script",
        slug="amp-fp16",
    )


def _named(slots: tuple[Slot, ...], chosen: ChosenDevices) -> str:
    noun = VENDORS[chosen.kind].noun
    return and_join(f"{noun} {slot.position} ({slot.device.name})" for slot in slots)


def _or_without(slots: tuple[Slot, ...], chosen: ChosenDevices) -> str:
    able = [str(slot.position) for slot in chosen.slots if slot not in slots]
    if not able:
        return ""
    positions = and_join(str(slot.position) for slot in slots)
    return f", or leave {VENDORS[chosen.kind].noun} {positions} out with --gpus {','.join(able)}"


def _this_has(lacking: tuple[Slot, ...]) -> str:
    found = sorted({slot.device.capability for slot in lacking} - {""})
    if not found:
        return ""
    return f"; {'this one has' if len(lacking) == 1 else 'these have'} {and_join(found)}"
