"""Decides mixed precision."""

from __future__ import annotations

from fasttrain.model.decision import Decision, Source
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import Amp
from fasttrain.model.machine import Device
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.describe import CPU_CORES, DEVICES, and_join, asked, device_names
from fasttrain.planning.levers.all import Situation
from fasttrain.planning.visible import Slot

MAY_SATURATE = "may saturate"
SATURATES = "saturates"
FP16 = "--amp fp16"
# NVIDIA's generation with fast fp16 and without bf16: V100, T4, RTX 20. The ones before have no
# tensor cores, and most of them compute fp16 slower than fp32. Source: CUDA C++ Programming Guide
# 12.9, throughput of native arithmetic instructions
_FP16_GENERATION = "7."


def decide(situation: Situation) -> Decision[Amp]:
    """Return the autocast dtype: bfloat16 where every device that is used has it, else none.

    Raises:
        FasttrainError: ``amp-unsupported`` for a precision that such a device lacks,
            ``amp-fp16`` on devices where its loss scaling isn't known to be right.
    """
    return _DECIDERS[situation.settings.amp.value](situation)


def _auto(situation: Situation) -> Decision[Amp]:
    kind = situation.chosen.kind
    if kind == "cpu":
        if situation.machine.cpu.bf16:
            return Decision(Amp("bfloat16", "cpu"), "this CPU has native bf16", CPU_CORES)
        needs = VENDORS["cpu"].bf16_needs
        return Decision(Amp("off", "cpu"), f"this CPU has no native bf16 ({needs})", CPU_CORES)
    if lacking := _lacking(situation.used):
        names = device_names(slot.device for slot in lacking)
        reason = f"no native bf16 on {names}{situation.which}"
        return Decision(Amp("off", kind), reason, DEVICES)
    names = device_names(slot.device for slot in situation.used)
    reason = f"native bf16 on {names}{situation.which}"
    return Decision(Amp("bfloat16", kind), reason, DEVICES)


def in_need_of_fp16(situation: Situation) -> tuple[Device, ...]:
    """Return the devices for whose lack of bf16 `decide` has chosen none, and that fp16 is for."""
    lacking = tuple(slot.device for slot in _lacking(situation.used))
    if situation.settings.amp.value != "auto" or situation.chosen.kind != "cuda":
        return ()
    able = all(slot.device.fp16 for slot in situation.used)
    fits = able and all(device.capability.startswith(_FP16_GENERATION) for device in lacking)
    return lacking if fits else ()


def _off(situation: Situation) -> Decision[Amp]:
    return Decision(Amp("off", situation.chosen.kind), *_asked(situation))


def _bf16(situation: Situation) -> Decision[Amp]:
    kind = situation.chosen.kind
    if lacking := _lacking(situation.used):
        raise _unsupported("bf16", VENDORS[kind].bf16_needs, lacking, situation)
    reason, source = _asked(situation)
    if kind == "cpu" and not situation.machine.cpu.bf16:
        reason += "; emulated on this CPU, slower than fp32"
    return Decision(Amp("bfloat16", kind), reason, source)


def _fp16(situation: Situation) -> Decision[Amp]:
    kind = situation.chosen.kind
    if not VENDORS[kind].loss_scaling:
        raise FasttrainError(
            f"fp16 was asked for, but not on {kind} devices yet",
            why="its loss scaling relies on how overflow shows there, which is not verified",
            fix="use --amp bf16 or --amp off",
            slug="amp-fp16",
        )
    if lacking := tuple(slot for slot in situation.used if not slot.device.fp16):
        raise _unsupported("fp16", "compute capability 5.3", lacking, situation)
    if saturating := _saturating(situation):
        raise _unscalable(saturating, situation)
    reason, source = _asked(situation)
    if kind == "cpu":
        reason += "; emulated on the CPU, slower than fp32"
    return Decision(Amp("float16", kind), reason, source)


_DECIDERS = {"auto": _auto, "off": _off, "bf16": _bf16, "fp16": _fp16}


def _asked(situation: Situation) -> tuple[str, Source]:
    setting = situation.settings.amp
    return asked(setting), setting.source


def _lacking(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    return tuple(slot for slot in slots if not slot.device.bf16)


def _saturating(situation: Situation) -> tuple[Slot, ...]:
    """Return the devices that are not known to give inf where fp16 overflows."""
    if not VENDORS[situation.chosen.kind].may_saturate:
        return ()
    return tuple(slot for slot in situation.used if slot.device.overflow != "inf")


def _unsupported(
    precision: str, needs: str, lacking: tuple[Slot, ...], situation: Situation
) -> FasttrainError:
    scales = VENDORS[situation.chosen.kind].loss_scaling and not _saturating(situation)
    fp16 = precision == "bf16" and scales and all(slot.device.fp16 for slot in lacking)
    able = [slot for slot in situation.chosen.slots if getattr(slot.device, precision)]
    without = _or_without(lacking, able, situation)
    return FasttrainError(
        f"{precision} was asked for, but {_named(lacking, situation)} can't do it",
        why=f"{precision} needs {needs}{_this_has(lacking)}{situation.which}",
        fix=f"use {'--amp fp16' if fp16 else '--amp off'}{without}",
        slug="amp-unsupported",
    )


def _unscalable(saturating: tuple[Slot, ...], situation: Situation) -> FasttrainError:
    unknown = any(not slot.device.overflow for slot in saturating)
    how = MAY_SATURATE if unknown else SATURATES if len(saturating) == 1 else "saturate"
    use = "--amp off" if _lacking(situation.used) else "--amp bf16"
    able = [slot for slot in situation.chosen.slots if slot.device.overflow == "inf"]
    without = _or_without(saturating, able, situation)
    return FasttrainError(
        f"fp16 was asked for, but {_named(saturating, situation)} {how} where it overflows",
        why="loss scaling skips the steps whose gradients hold inf, and there they hold fp16's"
        " largest number",
        fix=f"use {use}{without}; or write torch_npu.npu.amp's autocast"
        " and GradScaler, which ask the chip, into the script",
        slug="amp-fp16",
    )


def _named(slots: tuple[Slot, ...], situation: Situation) -> str:
    noun = VENDORS[situation.chosen.kind].noun
    return and_join(f"{noun} {slot.position} ({slot.device.name})" for slot in slots)


def _or_without(slots: tuple[Slot, ...], able: list[Slot], situation: Situation) -> str:
    if not able:
        return ""
    noun = VENDORS[situation.chosen.kind].noun
    positions = and_join(str(slot.position) for slot in slots)
    use = ",".join(str(slot.position) for slot in able)
    return f", or leave {noun} {positions} out with --gpus {use}"


def _this_has(lacking: tuple[Slot, ...]) -> str:
    found = sorted({slot.device.capability for slot in lacking} - {""})
    if not found:
        return ""
    return f"; {'this one has' if len(lacking) == 1 else 'these have'} {and_join(found)}"
