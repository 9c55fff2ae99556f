"""Decides the precision of fp32 matrix products."""

from __future__ import annotations

from fasttrain.model.decision import Decision
from fasttrain.model.levers import Amp, MatmulChoice
from fasttrain.planning.describe import DEVICES, asked, device_names
from fasttrain.planning.gpus import ChosenDevices
from fasttrain.planning.levers.all import Situation

CPU_NOTE = "; torch decides whether this CPU uses it"


def decide(situation: Situation) -> Decision[MatmulChoice]:
    """Return ``high`` (TF32) only where the run accepts lower precision already, else no change."""
    setting, chosen = situation.settings.matmul, situation.chosen
    amp: Amp = situation.decided["amp"].value
    if setting.value != "auto":
        return Decision(
            setting.value, asked(setting) + _cpu_note(setting.value, chosen), setting.source
        )
    if not chosen.devices:
        return Decision("keep", "TF32 is a format of GPUs; the run is on the CPU", DEVICES)
    devices = [slot.device for slot in situation.used]
    if not all(device.tf32 for device in devices):
        return Decision("keep", f"not every device has TF32{situation.which}", DEVICES)
    if amp.precision == "off":
        return Decision("keep", "amp is off, so full fp32 precision is kept", DEVICES)
    reason = f"TF32 on {device_names(devices)}; bf16 accepts lower precision already"
    return Decision("high", reason, DEVICES)


def _cpu_note(value: MatmulChoice, chosen: ChosenDevices) -> str:
    if chosen.kind != "cpu" or value in ("keep", "highest"):
        return ""
    return CPU_NOTE
