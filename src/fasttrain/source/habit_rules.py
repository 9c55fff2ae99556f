"""Signs of torch's switches, of devices and of frameworks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from fasttrain.source.habit_context import Context, Sign, is_literal, literal
from fasttrain.source.habits import Habit
from fasttrain.source.names import part_of
from fasttrain.source.ranks import FRAMEWORKS

# What is told by its name alone: the patterns of the names' parts below a package.
_NAMED: tuple[tuple[Habit, str, tuple[str, ...]], ...] = (
    (Habit.SYNC_BN, "torch.nn", ("SyncBatchNorm",)),
    (Habit.DATA_PARALLEL, "torch.nn", ("DataParallel",)),
    (Habit.RECURRENT, "torch.nn", ("LSTM", "GRU", "RNN")),
    (Habit.TORCHSCRIPT, "torch.jit", ("script", "trace")),
    (Habit.MATMUL, "torch", ("set_float32_matmul_precision",)),
)
# What has a switch, by position or by one of these keywords.
_SWITCHED: tuple[tuple[Habit, str, tuple[str, ...]], ...] = (
    (Habit.AUTOCAST, "torch", ("autocast",)),
    (Habit.SCALER, "torch", ("GradScaler",)),
    (Habit.ANOMALY, "torch.autograd", ("set_detect_anomaly", "detect_anomaly")),
    (Habit.DETERMINISTIC, "torch", ("use_deterministic_algorithms",)),
)
_SWITCHES = ("enabled", "mode")
# Those whose first argument by position is their switch.
_SWITCH_FIRST = ("torch.cuda.amp.autocast", "torch.cpu.amp.autocast")
_SWITCH_FIRST_NAMED = ("set_detect_anomaly", "use_deterministic_algorithms")
# Those that run the training loop, of the packages that make ranks.
_MANAGERS: Mapping[str, tuple[str, ...]] = {
    **{name: FRAMEWORKS[name] for name in ("accelerate", "composer", "deepspeed", "lightning")},
    **{name: FRAMEWORKS[name] for name in ("lightning_fabric", "mmengine", "pytorch_lightning")},
    **{name: FRAMEWORKS[name] for name in ("sentence_transformers", "transformers", "trl")},
    "ignite.engine": ("Engine", "create_supervised_trainer"),
}
_MANAGING_PACKAGES = {package.partition(".")[0] for package in _MANAGERS}
# How a framework is told to enter autocast: the values of its keywords that do.
_MIXED: Mapping[str, tuple[object, ...]] = {
    "precision": ("16-mixed", "bf16-mixed", "16", 16, "bf16"),  # lightning.Trainer
    "mixed_precision": ("fp16", "bf16", "fp8"),  # Accelerator
    "fp16": (True,),  # TrainingArguments
    "bf16": (True,),
}
_MATMUL_SWITCHES = (
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.fp32_precision",
)


def named(here: Context, call: ast.Call) -> Iterator[Sign]:
    """Give what is told by its name alone, and what can be switched off by an argument."""
    names = here.of(call.func)
    for habit, package, patterns in _NAMED:
        if what := part_of(names, package, patterns):
            yield habit, what, True
    for habit, package, patterns in _SWITCHED:
        if what := part_of(names, package, patterns):
            switches = [k.value for k in call.keywords if k.arg in _SWITCHES]
            if what in _SWITCH_FIRST_NAMED or not set(names).isdisjoint(_SWITCH_FIRST):
                switches += call.args[:1]
            if not any(literal(switch) is False for switch in switches):
                yield habit, what, all(literal(switch) is True for switch in switches)


def frameworks(here: Context, call: ast.Call) -> Iterator[Sign]:
    """Give frameworks that run the loop, and the precision that they are told to use."""
    names = here.kinds(call.func)
    for package, patterns in _MANAGERS.items():
        if what := part_of(names, package, patterns):
            yield Habit.FRAMEWORK, f"{package.partition('.')[0]}.{what}", True
    if {name.partition(".")[0] for name in names} & _MANAGING_PACKAGES:
        for keyword in call.keywords:
            wanted, sure = _MIXED.get(keyword.arg or "", ()), is_literal(keyword.value)
            if wanted and (literal(keyword.value) in wanted or not sure):
                yield Habit.PRECISION, f"{keyword.arg}={ast.unparse(keyword.value)}", sure


def arguments(here: Context, call: ast.Call) -> Iterator[Sign]:
    """Give what is told by a keyword, whoever is called."""
    given = {k.arg for k in call.keywords if literal(k.value) is True}
    if "create_graph" in given:
        yield Habit.SECOND_DERIVATIVES, "create_graph=True", True
    if "retain_graph" in given:
        yield Habit.RETAINED_GRAPH, "retain_graph=True", True
    if "sparse" in given:
        layer = part_of(here.of(call.func), "torch.nn", ("Embedding", "EmbeddingBag"))
        if layer:
            yield Habit.SPARSE, f"{layer}(sparse=True)", True


def devices(here: Context, call: ast.Call) -> Iterator[Sign]:
    """Give CUDA devices that are named in the code."""
    names = here.of(call.func)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    places = [k.value for k in call.keywords if k.arg == "device"]
    if "torch.device" in names or method == "to":
        places += call.args[:1]
    if not part_of(names, "torch", ("GradScaler", "autocast")):
        for place in map(literal, places):
            if isinstance(place, str) and (place == "cuda" or place.startswith("cuda:")):
                yield Habit.DEVICE, place, True
    if method == "cuda" and not names and not call.keywords:
        numbers = [literal(argument) for argument in call.args]
        if all(isinstance(number, int) for number in numbers):
            yield Habit.DEVICE, f"cuda:{numbers[0]}" if numbers else ".cuda()", True


def assigned(here: Context, target: ast.expr, value: ast.expr) -> Iterator[Sign]:
    """Give switches that are set by an assignment."""
    shown = ast.unparse(value)
    match target:
        case ast.Attribute():
            for full in here.of(target):
                if full in _MATMUL_SWITCHES:
                    yield Habit.MATMUL, f"{full} = {shown}", True
                elif full.startswith("torch.backends.cudnn."):
                    what = f"{full.removeprefix('torch.backends.')} = {shown}"
                    yield Habit.CUDNN, what, is_literal(value)
        case ast.Subscript(mapping, ast.Constant("CUDA_VISIBLE_DEVICES")):
            if "os.environ" in here.of(mapping):
                yield Habit.VISIBLE, f"CUDA_VISIBLE_DEVICES = {shown}", True
