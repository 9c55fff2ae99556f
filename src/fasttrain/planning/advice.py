"""What a user should know about a plan, and might try: its warnings and hints."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.planning.describe import device_names, kind_noun, torch_phrase
from fasttrain.planning.device import build_fix, unusable_kinds
from fasttrain.planning.draft import Draft

# Options that only one way of meeting uses: on one node, static on several, elastic.
_RENDEZVOUS_USERS: dict[str, tuple[str, ...]] = {
    "node_rank": ("static",),
    "master_addr": ("static",),
    "master_port": ("static",),
    "rdzv_id": ("elastic",),
    "rdzv_backend": ("elastic",),
    "rdzv_conf": ("elastic",),
}
MEETINGS = {"one node": "a run on one node", "static": "a static run", "elastic": "an elastic run"}


def warnings(draft: Draft) -> tuple[str, ...]:
    """Return what the user should know before trusting the run, one sentence each."""
    parts = (
        *(_found, _cpu_torch, _emulated, _unused_rendezvous, _unused_scope, _unused_restarts),
        *(_fresh_cache, _one_wandb_run, _other_python, _unused_python),
    )
    return tuple(sentence for part in parts for sentence in part(draft))


def hints(draft: Draft) -> tuple[str, ...]:
    """Return what the user might try, one sentence each."""
    visible = len(draft.chosen.names)
    one = draft.processes.value.nproc_per_node == 1
    if draft.chosen.explicit or not one or visible < 2:
        return ()
    there = kind_noun(draft.kind.value, visible)
    return (f"{there} are visible and one process uses them: --gpus all starts one on each.",)


def _found(draft: Draft) -> Iterator[str]:
    yield from (f"{note}." for note in draft.machine.notes)


def _cpu_torch(draft: Draft) -> Iterator[str]:
    if draft.settings.device.value != "auto" or draft.kind.value != "cpu":
        return
    for kind in unusable_kinds(draft.machine):
        names = device_names(device for device in draft.machine.devices if device.kind == kind)
        yield (
            f"{torch_phrase(draft.machine)} can't use {names}, so the run is on the CPU: "
            f"{build_fix(kind)}."
        )


def _emulated(draft: Draft) -> Iterator[str]:
    amp = draft.levers.amp.value
    if amp.precision == "bfloat16" and amp.device == "cpu" and not draft.machine.cpu.bf16:
        yield "bf16 is emulated on this CPU, slower than fp32: --amp off is faster."
    if amp.precision == "float16" and amp.device == "cpu":
        yield "fp16 is emulated on the CPU, slower than fp32: --amp off is faster."


def _unused_rendezvous(draft: Draft) -> Iterator[str]:
    processes = draft.processes.value
    several = "static" if processes.max_nodes > 1 else "one node"
    meeting = "elastic" if processes.rdzv_endpoint else several
    for name, users in _RENDEZVOUS_USERS.items():
        setting = getattr(draft.settings, name)
        if setting.source.explicit and meeting not in users:
            yield f"{setting.source} has no effect in {MEETINGS[meeting]}."


def _fresh_cache(draft: Draft) -> Iterator[str]:
    if draft.invocation.cache_note and draft.levers.compile.value.mode != "off":
        yield f"Compiled kernels are kept for this run alone: {draft.invocation.cache_note}."


def _other_python(draft: Draft) -> Iterator[str]:
    """Return whose interpreter runs the script where another environment is the active one."""
    invocation = draft.invocation
    if invocation.python_note and invocation.target.kind != "command":
        yield (
            f"{invocation.python_note}, and {invocation.python} runs the script:"
            " mend that, or name a Python with --python."
        )


def _unused_python(draft: Draft) -> Iterator[str]:
    named = draft.settings.python
    if named.value and draft.invocation.target.kind == "command":
        yield f"{named.source} has no effect with --no-python."


def _one_wandb_run(draft: Draft) -> Iterator[str]:
    """Return a warning where a mode that was set for wandb holds on rank 0 alone."""
    mode = draft.invocation.environ.get("WANDB_MODE") or "disabled"
    if draft.levers.strategy.value.injected and mode != "disabled":
        yield f"WANDB_MODE={mode} holds on rank 0; the other ranks make no run (disabled)."


def _unused_restarts(draft: Draft) -> Iterator[str]:
    """Tell of options for restarts where there are none."""
    most, on = draft.settings.max_restarts, draft.settings.restart_on
    if on.source.explicit and not most.value:
        yield f"{on.source} has no effect without --max-restarts."
    if most.value and draft.processes.value.backend == "slurm":
        yield f"{most.source} has no effect in place where SLURM starts the ranks."


def _unused_scope(draft: Draft) -> Iterator[str]:
    scope = draft.settings.compile_scope
    if scope.source.explicit and draft.levers.compile.value.mode == "off":
        yield f"{scope.source} has no effect while compile is off."
