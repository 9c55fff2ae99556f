"""What a script does that matters to its speed and to fasttrain's levers, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fasttrain.model.plan import Evidence
from fasttrain.source.names import Names


class Habit(StrEnum):
    """One thing that scripts do."""

    AUTOCAST = "autocast"
    SCALER = "gradient scaler"
    PRECISION = "precision of a framework"
    DTYPE = "models in another dtype"
    COMPILE = "own torch.compile"
    TORCHSCRIPT = "TorchScript"
    SECOND_DERIVATIVES = "second derivatives"
    RETAINED_GRAPH = "retained graph"
    RECURRENT = "recurrent layers"
    SYNC_BN = "SyncBatchNorm"
    DATA_PARALLEL = "DataParallel"
    MATMUL = "own matmul precision"
    CUDNN = "cuDNN switches"
    DETERMINISTIC = "deterministic algorithms"
    ANOMALY = "anomaly detection"
    OPTIMIZER = "optimizers"
    IMPLEMENTATION = "own optimizer implementation"
    SPARSE = "sparse gradients"
    LOADER = "data loaders"
    NO_WORKERS = "data loaders without workers"
    NO_PINNING = "data loaders without pinned memory"
    PERSISTENT = "persistent workers"
    SYNC = "waits in each step"
    WHOLE_MODEL = "saved whole models"
    DEEPCOPY = "copied models"
    DEVICE = "hard-coded devices"
    VISIBLE = "own CUDA_VISIBLE_DEVICES"
    FRAMEWORK = "training frameworks"


@dataclass(frozen=True, slots=True)
class Habits:
    """Everything of that kind that was found.

    Attributes:
        found: Each habit's places, in the order of the modules and their lines.
        open: Those of them where a condition, or a value that is no literal, decides.
    """

    found: dict[Habit, tuple[Evidence, ...]] = field(default_factory=dict)
    open: tuple[Evidence, ...] = ()

    def of(self, habit: Habit) -> tuple[Evidence, ...]:
        """Return the places of a habit; none if it was not found."""
        return self.found.get(habit, ())

    def sure(self, *habits: Habit) -> Evidence | None:
        """Return the first place of some habits that no condition decides on."""
        return next((e for h in habits for e in self.of(h) if e not in self.open), None)

    def any(self, *habits: Habit) -> Evidence | None:
        """Return the first place of some habits, one that is sure before those that aren't."""
        return self.sure(*habits) or next((e for h in habits for e in self.of(h)), None)


# What the rules for signs know of the module that they look at.


Sign = tuple[Habit, str, bool]  # what it is a sign of, what is used there, and whether it is sure


class Context:
    """A module.

    Attributes:
        nodes: All that may run in it.
        models: What `.parameters()` is asked of, in the source's words: it is a model, whatever it
            is called.
    """

    def __init__(self, names: Names, module: str, nodes: Sequence[ast.AST]) -> None:
        self.nodes = nodes
        self._names = names
        self._module = module
        self.models = {
            ast.unparse(node.func.value)
            for node in nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("parameters", "named_parameters")
        }
        self._making = {id(call) for node in nodes for call in self._makes(node)}

    def of(self, node: ast.expr | None) -> tuple[str, ...]:
        """Return the full names that ``a.b.c`` may stand for."""
        return self._names.of(self._module, node)

    def kinds(self, node: ast.expr | None) -> tuple[str, ...]:
        """Return the same, and for a class of the user's own what it derives from."""
        return self._names.kinds(self._module, node)

    def changes_model(self, call: ast.Call) -> bool:
        """Return whether a method is called on a model, or on what becomes one."""
        if id(call) in self._making:
            return True
        return isinstance(call.func, ast.Attribute) and self.is_model(call.func.value)

    def is_model(self, node: ast.expr) -> bool:
        """Return whether something is known to be a model."""
        return ast.unparse(node) in self.models

    def _makes(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the calls in ``model = Net().double()`` whose result is the model."""
        match node:
            case ast.Assign([target], ast.Call() as value) if self.is_model(target):
                call: ast.expr = value
                while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    yield call
                    call = call.func.value


def literal(node: ast.expr) -> object:
    """Return a literal's value; None for what is none."""
    return node.value if isinstance(node, ast.Constant) else None


def is_literal(node: ast.expr | None) -> bool:
    """Return whether a value stands in the source itself."""
    return isinstance(node, ast.Constant)


def subject(call: ast.Call) -> ast.expr | None:
    """Return what a function is called with first."""
    named = [k.value for k in call.keywords if k.arg in ("model", "obj", "x", "d")]
    return next(iter((*call.args, *named)), None)
