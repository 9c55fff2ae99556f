"""The rules that find habits in a script's source: each yields the signs of one syntax node."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence

from fasttrain.model.plan import Evidence
from fasttrain.source.habits import (
    Context,
    Habit,
    Habits,
    Scope,
    Sign,
    is_literal,
    literal,
    scoped,
    subject,
)
from fasttrain.source.local_modules import Module
from fasttrain.source.names import Names, chain, part_of
from fasttrain.source.ranks import FRAMEWORKS

# Habits that a name alone shows: patterns for the parts of full names inside a package.
_NAMED: tuple[tuple[Habit, str, tuple[str, ...]], ...] = (
    (Habit.SYNC_BN, "torch.nn", ("SyncBatchNorm",)),
    (Habit.DATA_PARALLEL, "torch.nn", ("DataParallel",)),
    (Habit.RECURRENT, "torch.nn", ("LSTM", "GRU", "RNN")),
    (Habit.TORCHSCRIPT, "torch.jit", ("script", "trace")),
    (Habit.MATMUL, "torch", ("set_float32_matmul_precision",)),
)
# Habits that an argument can switch off.
_SWITCHED: tuple[tuple[Habit, str, tuple[str, ...]], ...] = (
    (Habit.AUTOCAST, "torch", ("autocast",)),
    (Habit.SCALER, "torch", ("GradScaler",)),
    (Habit.ANOMALY, "torch.autograd", ("set_detect_anomaly", "detect_anomaly")),
    (Habit.DETERMINISTIC, "torch", ("use_deterministic_algorithms",)),
)
_SWITCHES = ("enabled", "mode")  # keywords of such arguments
# Functions whose first positional argument is the switch.
_SWITCH_FIRST = ("torch.cuda.amp.autocast", "torch.cpu.amp.autocast")
_SWITCH_FIRST_NAMED = ("set_detect_anomaly", "use_deterministic_algorithms")
# Frameworks that run the training loop.
_MANAGERS: Mapping[str, tuple[str, ...]] = {
    **{name: FRAMEWORKS[name] for name in ("accelerate", "composer", "deepspeed", "lightning")},
    **{name: FRAMEWORKS[name] for name in ("lightning_fabric", "mmengine", "pytorch_lightning")},
    **{name: FRAMEWORKS[name] for name in ("sentence_transformers", "transformers", "trl")},
    "ignite.engine": ("Engine", "create_supervised_trainer"),
}
_MANAGING_PACKAGES = {package.partition(".")[0] for package in _MANAGERS}
# Keywords by which frameworks enter autocast, with the values that do so.
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
    """Yield signs by name alone, and of what an argument can switch off."""
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
    """Yield frameworks that run the training loop, and the mixed precision that they get."""
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
    """Yield signs by keyword, whatever function is called."""
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
    """Yield hard-coded CUDA devices."""
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
    """Yield switches that are set by an assignment."""
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


# Keywords that choose an optimizer's implementation, and whether False is a choice for them.
_CHOICES = {"fused": True, "foreach": True, "capturable": False, "differentiable": False}
_DTYPES = {"double": "float64", "half": "float16", "bfloat16": "bfloat16"}


_STEP_HOOKS = ("register_step_pre_hook", "register_optimizer_step_pre_hook")


def optimizers(here: Context, call: ast.Call) -> Iterator[Sign]:
    """Yield optimizers by class, the implementation that is chosen, and hooks on their steps."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in _STEP_HOOKS:
        yield Habit.STEP_HOOK, name, True
    kinds = [name for name in here.kinds(call.func) if _is_optimizer(name)]
    if not kinds:
        return
    known = kinds[0].rpartition(".")[2]
    own = kinds[0] not in here.of(call.func)  # a class of the user's that derives from torch's
    yield Habit.OPTIMIZER, f"{chain(call.func)[-1]}({known})" if own else known, True
    for keyword in call.keywords:
        shown = ast.unparse(keyword.value)
        if keyword.arg is None:
            yield Habit.IMPLEMENTATION, f"**{shown}", False
        elif keyword.arg in _CHOICES:
            value = literal(keyword.value)
            chosen = value is True or (value is False and _CHOICES[keyword.arg])
            if chosen or not is_literal(keyword.value):
                yield Habit.IMPLEMENTATION, f"{keyword.arg}={shown}", chosen


def _is_optimizer(name: str) -> bool:
    """Return True for the full name of one of torch's optimizer classes."""
    module, _, last = name.rpartition(".")
    others = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")
    return f"{module}.".startswith("torch.optim.") and module not in others and last[:1].isupper()


def models(here: Context, call: ast.Call) -> Iterator[Sign]:
    """Yield what is done with a whole model: compile, change of dtype."""
    names, what = here.of(call.func), subject(call)
    if what is not None:
        is_model, shown = here.is_model(what), ast.unparse(what)
        if "torch.compile" in names:
            yield Habit.COMPILE, shown, is_model
        elif "torch.set_default_dtype" in names and _dtype(here, what) == "float64":
            yield Habit.DTYPE, "float64", True
    if isinstance(call.func, ast.Attribute) and here.changes_model(call):
        yield from _methods(here, call, call.func)


def _methods(here: Context, call: ast.Call, method: ast.Attribute) -> Iterator[Sign]:
    if method.attr in _DTYPES and not call.args:
        yield Habit.DTYPE, _DTYPES[method.attr], True
    elif method.attr == "to":
        for argument in (*call.args, *(k.value for k in call.keywords)):
            if dtype := _dtype(here, argument):
                yield Habit.DTYPE, dtype, True
    elif method.attr == "compile" and here.is_model(method.value):
        yield Habit.COMPILE, ast.unparse(method.value), True


def _dtype(here: Context, node: ast.expr) -> str:
    """Return a named floating dtype other than float32; empty for anything else."""
    named = part_of(here.of(node), "torch", (*_DTYPES, *_DTYPES.values()))
    return _DTYPES.get(named, named)


_NUM_WORKERS = 5  # its position, after dataset, batch_size, shuffle, sampler and batch_sampler
# Workers don't help samples that are in memory, and each worker would read a whole stream itself.
_UNSUITED = ("TensorDataset", "IterableDataset")


def loaders(here: Context, call: ast.Call) -> Iterator[Sign]:
    """Yield DataLoaders, and how they are configured."""
    if not part_of(here.kinds(call.func), "torch.utils.data", ("DataLoader",)):
        return
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    yield Habit.LOADER, "DataLoader", True
    own = not part_of(here.of(call.func), "torch.utils.data", ("DataLoader",))
    if own or None in given or any(isinstance(a, ast.Starred) for a in call.args):
        return  # a class of the user's own, or **options: the arguments are unknown
    workers = given.get("num_workers", next(iter(call.args[_NUM_WORKERS:]), None))
    if _is(workers, 0):
        if _gains(here, call):
            yield Habit.NO_WORKERS, "DataLoader", True
    elif len(call.args) <= _NUM_WORKERS + 1 and _is(given.get("pin_memory"), 0):
        yield Habit.NO_PINNING, "DataLoader", is_literal(workers)
    persistent = given.get("persistent_workers")
    if not _is(persistent, 0):
        yield Habit.PERSISTENT, "DataLoader", is_literal(persistent)


def _is(node: ast.expr | None, default: int) -> bool:
    """Return True if an argument has its default value, given or not; False counts as 0."""
    return node is None or (isinstance(node, ast.Constant) and node.value == default)


def _gains(here: Context, call: ast.Call) -> bool:
    """Return True if workers may help; False for unsuited datasets, and for those that may be."""
    if kinds := here.kinds(_maker(here, call)):
        return not part_of(kinds, "torch", _UNSUITED)
    made = (node.func for node in here.nodes if isinstance(node, ast.Call))
    based = (base for node in here.nodes if isinstance(node, ast.ClassDef) for base in node.bases)
    return not any(part_of(here.of(name), "torch", _UNSUITED) for name in (*made, *based))


def _maker(here: Context, call: ast.Call) -> ast.expr | None:
    """Return the function that made a loader's dataset, called in place or assigned once."""
    dataset = call.args[0] if call.args else None
    dataset = next((k.value for k in call.keywords if k.arg == "dataset"), dataset)
    if isinstance(dataset, ast.Name):
        values = [v for name, v in _assignments(here) if name == dataset.id]
        dataset = values[0] if len(values) == 1 else None
    return dataset.func if isinstance(dataset, ast.Call) else None


def _assignments(here: Context) -> Iterator[tuple[str, ast.expr]]:
    for node in here.nodes:
        match node:
            case ast.Assign([ast.Name(name)], value):
                yield name, value


def syncs(nodes: Sequence[tuple[ast.AST, Scope]]) -> Iterator[tuple[str, int]]:
    """Yield calls that synchronise with the device in each training step, with their lines.

    These are calls in the same loop or function as a call of ``backward``, under no condition.
    ``.numpy()`` doesn't count: it works only on tensors that are on the host already.
    """
    calls = [(node, scope) for node, scope in nodes if isinstance(node, ast.Call)]
    steps: dict[int, set[str]] = {}  # by id of the loop or function: its losses, as source text
    for call, scope in calls:
        if (losses := _losses(call)) is not None and scope.unit is not None:
            steps.setdefault(id(scope.unit), set()).update(losses)
    found: set[int] = set()
    for call, scope in calls:
        known = steps.get(id(scope.unit))
        if known is None or scope.sometimes or call.lineno in found:
            continue
        if what := _waits(call, known):
            found.add(call.lineno)
            yield what, call.lineno


def _losses(call: ast.Call) -> set[str] | None:
    """Return the losses of a call of ``backward``, as source text; None for other calls."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "backward"):
        return None
    begins = [call.func.value, *call.args[:1]]
    if isinstance(begins[0], ast.Call):  # scaler.scale(loss).backward()
        begins += begins[0].args
    return {ast.unparse(part) for part in begins if isinstance(part, ast.Name | ast.Attribute)}


def _waits(call: ast.Call, losses: set[str]) -> str:
    match call:
        case ast.Call(ast.Attribute(attr="item" | "cpu" as method), [], []):
            return f".{method}()"
        case ast.Call(ast.Name("float"), [argument]) if ast.unparse(argument) in losses:
            return f"float({ast.unparse(argument)})"
        case ast.Call(ast.Name("print"), arguments):
            printed = [ast.unparse(part) for a in arguments for part in _printed(a)]
            return next((f"print of {part}" for part in printed if part in losses), "")
    return ""


def _printed(argument: ast.expr) -> Iterator[ast.expr]:
    yield argument
    for part in argument.values if isinstance(argument, ast.JoinedStr) else ():
        if isinstance(part, ast.FormattedValue):
            yield part.value


_RULES: tuple[Callable[[Context, ast.Call], Iterator[Sign]], ...] = (
    *(named, frameworks, arguments, devices, optimizers, models, loaders),
)


class Signs:
    """Collects the signs of habits, module by module."""

    def __init__(self, names: Names) -> None:
        """Start without any sign; `names` must know all modules already."""
        self._names = names
        self._found: dict[Habit, list[Evidence]] = {}
        self._open: list[Evidence] = []

    def add(self, module: Module) -> None:
        """Add the signs of a module."""
        module = module.parsed()
        assert module.tree
        live = {id(node): node for node in module.nodes}
        nodes = [(live[id(node)], scope) for node, scope in scoped(module.tree) if id(node) in live]
        here = Context(self._names, module.name, [node for node, _ in nodes])
        for node, scope in nodes:
            for habit, what, sure in _signs_at(here, node):
                evidence = Evidence(what, f"{module.path}:{node.lineno}")
                self._take(habit, evidence, sure=sure and not scope.open)
        for what, line in syncs(nodes):
            self._take(Habit.SYNC, Evidence(what, f"{module.path}:{line}"), sure=True)

    def habits(self) -> Habits:
        """Return the habits that were found."""
        return Habits({h: tuple(places) for h, places in self._found.items()}, tuple(self._open))

    def _take(self, habit: Habit, evidence: Evidence, *, sure: bool) -> None:
        places = self._found.setdefault(habit, [])
        if evidence not in places:
            places.append(evidence)
            if not sure:
                self._open.append(evidence)


def _signs_at(here: Context, node: ast.AST) -> Iterator[Sign]:
    """Yield the signs of one node, without its children."""
    if isinstance(node, ast.Call):
        for rule in _RULES:
            yield from rule(here, node)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from assigned(here, target, node.value)
    elif isinstance(node, ast.FunctionDef) and node.name == "forward":
        decorators = [name for decorator in node.decorator_list for name in here.of(decorator)]
        if "torch.compile" in decorators:
            yield Habit.COMPILE, "forward", True
