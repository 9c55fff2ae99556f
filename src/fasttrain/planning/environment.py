"""Composes the workers' environment, as a difference to the user's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fasttrain.model.attempts import RESTART_COUNT, Guards
from fasttrain.model.decision import Decision, Setting, Source, SourceKind
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.levers import Levers
from fasttrain.model.machine import Machine
from fasttrain.model.places import COMPILED_FOLDER, COMPILED_VARIABLE, RUN_MARK
from fasttrain.model.plan import EnvVar, Invocation, Processes
from fasttrain.model.settings import Settings
from fasttrain.model.vendors import VENDORS, DeviceKind, Vendor
from fasttrain.planning.describe import BUILT_IN, CPU_CORES, is_exact
from fasttrain.planning.gpus import ChosenDevices
from fasttrain.planning.visible import repeated_mask

# The decisions from which the environment and the command are composed.


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan without its environment and command.

    Attributes:
        settings: The user's settings.
        machine: The machine of the run.
        invocation: The call of fasttrain.
        kind: Kind of device.
        chosen: The devices.
        processes: The processes.
        levers: Changes in the worker.
        guards: What is watched during the run.
    """

    settings: Settings
    machine: Machine
    invocation: Invocation
    kind: Decision[DeviceKind]
    chosen: ChosenDevices
    processes: Decision[Processes]
    levers: Levers
    guards: Guards


# Composes the workers' environment, as a difference to the user's.


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Limits that torch ignores: it sizes its thread pool by the CPU affinity.
_IGNORED_BY_TORCH = re.compile(r"quota|slurm", re.IGNORECASE)


OWN_VALUE_WON = "your own value won"
EMPTY = "an empty one"


@dataclass(frozen=True, slots=True)
class _Wish:
    """A variable that fasttrain would set; `forced` if it overrides the user's value."""

    name: str
    value: str
    reason: str
    source: Source
    forced: bool = False


def compose(draft: Draft) -> tuple[EnvVar, ...]:
    """Return the variables that are set, and those that the user has set already.

    Entries of --env come last, and override fasttrain's.

    Raises:
        FasttrainError: ``env-syntax`` or ``env-reserved`` for an --env entry that can't be set.
    """
    entries = parse_env(draft.settings.env)
    wishes = {wish.name: wish for part in _PARTS for wish in part(draft)}
    environ = draft.invocation.environ
    composed = [_settle(wish, environ) for wish in wishes.values() if wish.name not in entries]
    own = [
        EnvVar(name, value, _own_reason(wishes.get(name)), draft.settings.env.source)
        for name, value in entries.items()
    ]
    return (*composed, *own)


def parse_env(setting: Setting[tuple[str, ...]]) -> dict[str, str]:
    """Return the --env entries by name; the last entry of a name wins.

    Raises:
        FasttrainError: ``env-syntax``, or ``env-reserved`` for the run's mark.
    """
    entries: dict[str, str] = {}
    for text in setting.value:
        name, equals, value = text.partition("=")
        if not equals or not _NAME.fullmatch(name) or "\0" in value:
            # The text may hold a secret, so the message has only what precedes the = sign.
            raise FasttrainError(
                f"--env {name if equals else '...'!r} is not NAME=VALUE",
                why="a name is letters, digits and underscores, and a value follows the = sign",
                fix="write it like --env NCCL_DEBUG=INFO",
                slug="env-syntax",
                exit_code=ExitCode.USAGE,
            )
        entries[name] = value
    if RUN_MARK in entries:
        raise FasttrainError(
            f"--env {RUN_MARK} is not for users to set",
            why="a run finds its own processes by it, and could end those of another run",
            fix="leave it out",
            slug="env-reserved",
        )
    return entries


def _own_reason(wish: _Wish | None) -> str:
    if wish is None:
        return "asked for by name"
    return f"asked for by name; fasttrain would have set {wish.value}: {wish.reason}"


def _settle(wish: _Wish, environ: Mapping[str, str]) -> EnvVar:
    before = environ.get(wish.name)
    if before is None or wish.forced:
        return EnvVar(wish.name, wish.value, wish.reason, wish.source)
    own = Source(SourceKind.ENV, wish.name)
    if before == wish.value:
        return EnvVar(wish.name, before, f"set by you already: {wish.reason}", own, kept=True)
    reason = f"{OWN_VALUE_WON}; fasttrain would have set {wish.value}: {wish.reason}"
    return EnvVar(wish.name, before, reason, own, kept=True)


def _identity(draft: Draft) -> Iterator[_Wish]:
    reason = "marks the processes of this run"
    yield _Wish(RUN_MARK, draft.invocation.run_id, reason, BUILT_IN, forced=True)
    if count := draft.invocation.restart_count:
        reason = "tells the script how often the run was restarted"
        yield _Wish(RESTART_COUNT, str(count), reason, BUILT_IN, forced=True)


def _visibility(draft: Draft) -> Iterator[_Wish]:
    vendor, environ = VENDORS[draft.kind.value], draft.invocation.environ
    value, source = ",".join(draft.chosen.names), draft.chosen.decision.source
    repeated = repeated_mask(vendor, environ)
    if draft.chosen.explicit and vendor.visibility:
        reason = draft.chosen.decision.reason + _relative(vendor, environ)
        yield _Wish(vendor.visibility, value, reason, source, forced=True)
    elif repeated and value != environ[repeated]:
        reason = f"{repeated} repeats {vendor.narrowed_first}, and would be taken from what that"
        yield _Wish(vendor.visibility, value, f"{reason} leaves", source)


def _relative(vendor: Vendor, environ: Mapping[str, str]) -> str:
    """Return what the names of devices are relative to, as part of a reason."""
    told = ""
    before = environ.get(vendor.visibility) or environ.get(vendor.visibility_else)
    if before and not repeated_mask(vendor, environ):
        told += f", relative to {before}, which was visible before"
    if vendor.narrowed_first in environ:
        below = f"{vendor.narrowed_first}={environ[vendor.narrowed_first]}"
        told += f"; they count what {below} leaves"
    return told


def _order(draft: Draft) -> Iterator[_Wish]:
    """Have the runtime count as the plan does, where no UUID can name a device."""
    chosen, order = draft.chosen, VENDORS[draft.kind.value].bus_order
    if order and chosen.by_bus and (chosen.explicit or draft.processes.value.nproc_per_node > 1):
        reason = "the devices are chosen by their indices, which are those of nvidia-smi"
        yield _Wish(*order, reason, chosen.decision.source, forced=True)


def _hidden(draft: Draft) -> Iterator[_Wish]:
    asked = draft.settings.device
    if asked.value != "cpu":
        return
    reason = f"{asked.source} cpu: a script that looks for GPUs must find none"
    for kind in dict.fromkeys(device.kind for device in draft.machine.devices):
        if VENDORS[kind].hidden:
            value = VENDORS[kind].hidden
            yield _Wish(VENDORS[kind].visibility, value, reason, asked.source, forced=True)


def _precision(draft: Draft) -> Iterator[_Wish]:
    amp = draft.levers.amp
    if amp.value.precision == "bfloat16" and amp.value.device == "cuda":
        reason = "bf16 convolutions needed it up to torch 1.13; harmless later"
        yield _Wish("TORCH_CUDNN_V8_API_ENABLED", "1", reason, amp.source)


def _threads(draft: Draft) -> Iterator[_Wish]:
    cpu, local = draft.machine.cpu, draft.processes.value.nproc_per_node
    if local == 1 and (is_exact(draft.settings) or not _IGNORED_BY_TORCH.search(cpu.cores_reason)):
        return  # the number of threads changes the last bits of sums
    reason = f"{cpu.cores} cores granted ({cpu.cores_reason})"
    if local > 1:
        reason += f", over {local} processes on this node"
    yield _Wish("OMP_NUM_THREADS", str(max(1, cpu.cores // local)), reason, CPU_CORES)


def _tuned(draft: Draft) -> Iterator[_Wish]:
    for one in draft.invocation.tuned:
        if one.value is not None:
            yield _Wish(one.name, one.value, one.reason, one.source)


def _loopback(draft: Draft) -> Iterator[_Wish]:
    processes = draft.processes.value
    if processes.max_nodes == 1 and processes.world_size > 1:
        reason = "the ranks of one node meet on loopback, where nobody else can"
        yield _Wish("GLOO_SOCKET_IFNAME", "lo", reason, BUILT_IN)
        if variable := VENDORS[draft.kind.value].socket_variable:
            yield _Wish(variable, "lo", reason, BUILT_IN)


def _shutdown(draft: Draft) -> Iterator[_Wish]:
    setting, backend = draft.settings.shutdown_timeout, draft.processes.value.backend
    if backend == "torchrun" and setting.source.kind is not SourceKind.DEFAULT:
        reason = "torchrun's agent waits for its workers as long as the launcher waits for the run"
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        yield _Wish(name, str(setting.value), reason, setting.source, forced=True)


def _hashing(draft: Draft) -> Iterator[_Wish]:
    if draft.levers.strategy.value.injected:
        reason = "sets of strings must have one order on all ranks, such as those of a vocabulary"
    elif draft.settings.preempt.value == "snapshot":
        reason = "sets of strings must keep their order in a resumed run, such as a vocabulary's"
    else:
        return
    # Python treats an empty value as "random", which would give each process another order.
    # Source: Python/preconfig.c of CPython, _Py_GetEnv
    before = draft.invocation.environ.get("PYTHONHASHSEED")
    random = before in ("", "random")
    if random:
        reason += f"; your own value, {before or EMPTY}, would give each process one of its own"
    yield _Wish("PYTHONHASHSEED", "0", reason, BUILT_IN, forced=random)


def _cache(draft: Draft) -> Iterator[_Wish]:
    compiled = draft.levers.compile
    if compiled.value.mode != "off":
        path = f"{draft.invocation.cache_dir}/{COMPILED_FOLDER}"
        reason = "compiled kernels persist between runs; /tmp does not outlive a reboot"
        reason = draft.invocation.cache_note or reason
        yield _Wish(COMPILED_VARIABLE, path, reason, compiled.source)


def _debug(draft: Draft) -> Iterator[_Wish]:
    setting = draft.settings.debug
    if not setting.value:
        return
    if blocking := VENDORS[draft.kind.value].blocking:
        yield _Wish(*blocking, "an error shows the line that launched the kernel", setting.source)
    yield _Wish(
        "TORCH_SHOW_CPP_STACKTRACES", "1", "errors of torch show their C++ frames", setting.source
    )
    if draft.processes.value.world_size > 1:
        reason = "torch.distributed checks that the ranks call the same collectives"
        yield _Wish("TORCH_DISTRIBUTED_DEBUG", "DETAIL", reason, setting.source)
    reason = "a crash below Python shows the Python stack"
    yield _Wish("PYTHONFAULTHANDLER", "1", reason, setting.source)


# If two parts set one variable, the later one wins.
_PARTS = (
    _identity,
    _visibility,
    _order,
    _hidden,
    _precision,
    _threads,
    _tuned,
    _loopback,
    _shutdown,
    _hashing,
    _cache,
    _debug,
)
