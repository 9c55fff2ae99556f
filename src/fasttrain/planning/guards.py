"""Decides what is watched while the script trains: its progress, and its gradients."""

from __future__ import annotations

import re

from fasttrain.model.decision import Decision, Setting, Source, SourceKind
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.guards import Guards, HangWatch
from fasttrain.model.machine import Machine
from fasttrain.model.settings import Settings
from fasttrain.planning.sources import BUILT_IN, asked

_SECONDS = re.compile(r"[1-9][0-9]{0,6}")


def decide_guards(settings: Settings, machine: Machine) -> Guards:
    """Give what is watched.

    Raises:
        FasttrainError: ``hang-timeout`` for a time that is none, or a system without ``/proc``.
    """
    nan = settings.on_nan
    return Guards(hang=_hang(settings, machine), nan=Decision(nan.value, asked(nan), nan.source))


def no_guards() -> Guards:
    """Give what is watched of a command that is not Python: nothing."""
    reason = "no Python: fasttrain starts this command as it is"
    return Guards(
        hang=Decision(HangWatch(on=False), reason, BUILT_IN),
        nan=Decision("off", reason, BUILT_IN),
    )


def _hang(settings: Settings, machine: Machine) -> Decision[HangWatch]:
    setting, action = settings.hang_timeout, settings.on_hang.value
    if setting.value == "off":
        return Decision(HangWatch(on=False), asked(setting), setting.source)
    if setting.value != "auto" and not _SECONDS.fullmatch(setting.value):
        raise _no_time(setting)
    if machine.system != "Linux":
        if setting.source.explicit and setting.value != "auto":
            raise _no_proc(setting, machine)
        where = Source(SourceKind.MACHINE, "system")
        return Decision(HangWatch(on=False), "it needs Linux, whose /proc it reads", where)
    if setting.value == "auto":
        reason = "after 20 slow steps, at least 1 min, or 5 min where something computes"
        return Decision(HangWatch(on=True, action=action), reason, setting.source)
    watch = HangWatch(on=True, timeout_s=int(setting.value), action=action)
    return Decision(watch, asked(setting), setting.source)


def _no_time(setting: Setting[str]) -> FasttrainError:
    usage = setting.source.kind is SourceKind.FLAG
    return FasttrainError(
        f"{setting.source}: a hang timeout can't be {setting.value!r}",
        why="it takes auto, off, or whole seconds from 1",
        fix="write it like --hang-timeout 600",
        slug="hang-timeout",
        exit_code=ExitCode.USAGE if usage else ExitCode.CONTRADICTION,
    )


def _no_proc(setting: Setting[str], machine: Machine) -> FasttrainError:
    return FasttrainError(
        f"hangs can't be watched for on {machine.system} ({setting.source})",
        why="that reads Linux's /proc",
        fix="use --hang-timeout off",
        slug="hang-timeout",
    )
