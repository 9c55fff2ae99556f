"""The levers as one table: what each one is, for the launcher and for the worker.

A new lever is a decider in ``planning/levers``, a class in the worker, and here its option, its
field of `Levers` and its row of `LEVERS`. All that lists levers reads this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fasttrain.model.decision import LEVERS as PANEL
from fasttrain.model.decision import Decision, Setting, option
from fasttrain.model.vendors import DeviceKind, DeviceOptions

AmpChoice = Literal["auto", "off", "bf16", "fp16"]
CompileMode = Literal[
    "off", "auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
CompileScope = Literal["model", "blocks"]
OptimizerChoice = Literal["auto", "keep", "fused", "npu"]
MatmulChoice = Literal["auto", "keep", "highest", "high", "medium"]
StrategyChoice = Literal["auto", "none", "ddp", "fsdp"]
BatchChoice = Literal["split", "per-rank"]

Precision = Literal["off", "bfloat16", "float16"]
OptimizerMode = Literal["keep", "fused", "npu"]
StrategyMode = Literal["none", "script", "ddp", "fsdp"]


@dataclass(frozen=True, slots=True)
class LeverOptions(DeviceOptions):
    """The options of `Settings` that choose levers, after those that choose devices."""

    amp: Setting[AmpChoice] = option("auto", "Mixed precision of the model's calls", panel=PANEL)
    compile: Setting[CompileMode] = option("auto", "torch.compile mode of the model", panel=PANEL)
    compile_scope: Setting[CompileScope] = option(
        "model", "Compile the whole model, or its repeated blocks once", panel=PANEL
    )
    optimizer: Setting[OptimizerChoice] = option("auto", "Optimizer implementation", panel=PANEL)
    matmul: Setting[MatmulChoice] = option(
        "auto", "Precision of fp32 matrix products (TF32 on CUDA)", panel=PANEL
    )
    strategy: Setting[StrategyChoice] = option(
        "auto", "What makes several processes one training run", panel=PANEL
    )
    batch: Setting[BatchChoice] = option(
        "split", "Split each batch among the ranks, or one batch per rank", panel=PANEL
    )


@dataclass(frozen=True, slots=True)
class Amp:
    """Mixed precision: the autocast dtype, and the device kind that it was decided for."""

    precision: Precision
    device: DeviceKind


@dataclass(frozen=True, slots=True)
class Compile:
    """torch.compile: how models are compiled.

    Attributes:
        asked: The mode that was asked for; with ``auto`` the worker decides when, and whether.
        mode: The mode that is used at first, without CUDA graphs.
        scope: What is compiled.
        graphs: The mode with CUDA graphs, to which a loop switches once it has proved safe for
            them; None without CUDA graphs.
    """

    asked: CompileMode
    mode: CompileMode
    scope: CompileScope = "model"
    graphs: CompileMode | None = None


@dataclass(frozen=True, slots=True)
class Strategy:
    """What makes several processes one training run.

    Attributes:
        mode: ``none``: one process, or unrelated ones on purpose; ``script``: the script handles
            its ranks; ``ddp``, ``fsdp``: the shim makes a script data-parallel that isn't.
        batch: Whether the ranks split each batch of the script, or each has batches of its own.
        collectives: torch.distributed's backend for the devices, such as ``nccl``.
        visibility: Variable that limits each worker to its own device; empty if none is to be, or
            can be, limited.
    """

    mode: StrategyMode
    batch: BatchChoice = "split"
    collectives: str = ""
    visibility: str = ""

    @property
    def injected(self) -> bool:
        """True if the shim makes the script data-parallel, since it doesn't handle ranks itself."""
        return self.mode in ("ddp", "fsdp")


@dataclass(frozen=True, slots=True)
class Levers:
    """The changes that the shim makes in the worker, one decision per lever."""

    amp: Decision[Amp]
    compile: Decision[Compile]
    optimizer: Decision[OptimizerMode]
    matmul: Decision[MatmulChoice]
    strategy: Decision[Strategy]

    def on(self) -> dict[str, str]:
        """Return the levers that are on, each with the word of its value."""
        words = {name: row.mode(getattr(self, name).value) for name, row in LEVERS.items()}
        left = {name: (row.off, *row.ceded) for name, row in LEVERS.items()}
        return {name: word for name, word in words.items() if word not in left[name]}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverRow:
    """All that differs between levers where one is chosen, explained, built or compared.

    Its key in `LEVERS` is the field of `Levers`, the option, and its name in the receipt; its
    decider is ``decide`` in ``fasttrain.planning.levers.KEY``.

    Attributes:
        mode: The one word that a decided value comes down to.
        off: The word of a value that changes nothing.
        off_value: That value itself, for a command without Python.
        idle: Values of the option that a command without Python honours by doing nothing.
        presets: What each preset that says something about it sets the option to.
        after: Levers whose decisions its decider needs.
        identity: What a snapshot compares before a run goes on from it; None for nothing.
        at_roots: Whether it acts where a root is called.
        workers: Modules of the worker, by the word of the value; each has a function ``build``,
            and is imported only for that value.
        shown: How a person reads the value; None for its one word.
        several: Whether only a worker that is one of several ranks has it.
        tried: What ``fasttrain tune`` sets the option to where nobody has; None for the default.
        undecided: Values of the option that leave a choice to the run: a result of tuning decides
            it, and tune tries ``tried`` in their place.
        switched: Words of the values that are switched on and off between the steps of one process,
            each with what it rounds results by; their module's lever has a method ``switch``.
        ceded: Words of a value that leaves it to the script.
    """

    mode: Callable[[Any], str]
    off: str
    off_value: Callable[[DeviceKind, LeverOptions], Any]
    idle: tuple[str, ...]
    presets: Mapping[str, str]
    after: tuple[str, ...]
    identity: Callable[[Any], str] | None
    at_roots: bool
    workers: Mapping[str, tuple[str, ...]]
    shown: Callable[[Any], str] | None = None
    several: bool = False
    ceded: tuple[str, ...] = ()
    tried: str | None = None
    undecided: tuple[str, ...] = ()
    switched: Mapping[str, float] = field(default_factory=dict)

    def words(self, value: Any) -> str:
        """Return the value as a person reads it."""
        return (self.shown or self.mode)(value)


def _compile_words(compiled: Compile) -> str:
    mode = "auto" if compiled.asked == "auto" else compiled.mode
    return mode if compiled.scope == "model" else f"{mode}, {compiled.scope}"


_SHIM = "fasttrain.shim.levers"
_AMP, _SCALING = f"{_SHIM}.amp.lever", f"{_SHIM}.loss_scaling.lever"
_FUSED, _NPU = f"{_SHIM}.optimizer", f"{_SHIM}.npu_optimizer.lever"
_PARALLEL = "fasttrain.shim.data_parallel.strategy"


# The order is that of the receipt, and that in which the worker installs them. First what makes
# ranks one run, so that other levers' work on a backward pass is around that of the ranks.
LEVERS: dict[str, LeverRow] = {
    "strategy": LeverRow(
        mode=lambda strategy: strategy.mode,
        off="none",
        off_value=lambda _kind, _options: Strategy("none"),
        idle=("auto", "none"),
        presets={},
        after=(),
        identity=lambda s: f"{s.mode} {s.batch}" if s.injected else "none",
        at_roots=True,
        workers={"ddp": (_PARALLEL,), "fsdp": (_PARALLEL,)},
        shown=lambda s: f"{s.mode}, batch {s.batch}" if s.injected else s.mode,
        several=True,
        ceded=("script",),
    ),
    "amp": LeverRow(
        mode=lambda amp: amp.precision,
        off="off",
        off_value=lambda kind, _options: Amp("off", kind),
        idle=("auto", "off"),
        presets={"exact": "off"},
        after=(),
        identity=lambda amp: amp.precision,
        at_roots=True,
        workers={"bfloat16": (_AMP,), "float16": (_AMP, _SCALING)},
        switched={"bfloat16": 2**-8},
    ),
    "compile": LeverRow(
        mode=lambda compiled: compiled.asked,
        off="off",
        off_value=lambda _kind, options: Compile("off", "off", options.compile_scope.value),
        idle=("auto", "off"),
        presets={"exact": "off", "fast": "default", "max": "max-autotune"},
        after=("strategy",),
        identity=lambda compiled: f"{compiled.mode} {compiled.scope}",
        at_roots=True,
        workers=dict.fromkeys(get_args(CompileMode)[2:], (f"{_SHIM}.compile.lever",))
        | {"auto": ("fasttrain.shim.compile_auto.lever",)},
        shown=_compile_words,
        tried="default",
        undecided=("auto",),
        switched=dict.fromkeys(("default", "max-autotune-no-cudagraphs"), 2**-24),
    ),
    "optimizer": LeverRow(
        mode=str,
        off="keep",
        off_value=lambda _kind, _options: "keep",
        idle=("auto", "keep"),
        presets={"exact": "keep"},
        after=(),
        identity=str,
        at_roots=False,
        workers={"fused": (_FUSED,), "npu": (_NPU, _FUSED)},
        switched={"fused": 2**-24},
    ),
    "matmul": LeverRow(
        mode=str,
        off="keep",
        off_value=lambda _kind, _options: "keep",
        idle=("auto", "keep"),
        presets={"exact": "keep"},  # torch's own default isn't "highest" everywhere
        after=("amp",),
        identity=None,
        at_roots=False,
        switched={"high": 2**-11, "medium": 2**-8},  # TF32 and bf16
        # Kept as it is, too, the script's own choice is watched for.
        workers=dict.fromkeys(get_args(MatmulChoice)[1:], (f"{_SHIM}.matmul",)),
    ),
}
