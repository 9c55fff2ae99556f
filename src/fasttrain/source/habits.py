"""Habits of a script that matter to its speed and to fasttrain's levers."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fasttrain.model.plan import Evidence
from fasttrain.source.names import Names


class Habit(StrEnum):
    """One thing that scripts do, under the name that doctor uses."""

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
    STEP_HOOK = "optimizer step pre-hooks"
    LOADER = "data loaders"
    NO_WORKERS = "data loaders without workers"
    NO_PINNING = "data loaders without pinned memory"
    PERSISTENT = "persistent workers"
    SYNC = "waits in each step"
    DEVICE = "hard-coded devices"
    VISIBLE = "own CUDA_VISIBLE_DEVICES"
    FRAMEWORK = "training frameworks"


@dataclass(frozen=True, slots=True)
class Habits:
    """The habits of a script.

    Attributes:
        found: Each habit's places, in the order of the modules and their lines.
        open: Uncertain places: a condition, or a value that is no literal, decides.
    """

    found: dict[Habit, tuple[Evidence, ...]] = field(default_factory=dict)
    open: tuple[Evidence, ...] = ()

    def of(self, habit: Habit) -> tuple[Evidence, ...]:
        """Return the places of a habit; empty if it was not found."""
        return self.found.get(habit, ())

    def sure(self, *habits: Habit) -> Evidence | None:
        """Return the first certain place of any of some habits."""
        return next((e for h in habits for e in self.of(h) if e not in self.open), None)

    def any(self, *habits: Habit) -> Evidence | None:
        """Return the first place of any of some habits, a certain one if there is one."""
        return self.sure(*habits) or next((e for h in habits for e in self.of(h)), None)


Sign = tuple[Habit, str, bool]  # the habit, what is used there, and whether that is certain


class Context:
    """One module, as the rules for signs see it.

    Attributes:
        nodes: Its nodes that may run.
        models: The expressions whose `.parameters()` is called, as source text. They are models,
            whatever their names.
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
        """Return the full names that ``a.b.c`` may mean."""
        return self._names.of(self._module, node)

    def kinds(self, node: ast.expr | None) -> tuple[str, ...]:
        """Return the same, and for a class of the user's own the names of its base classes."""
        return self._names.kinds(self._module, node)

    def changes_model(self, call: ast.Call) -> bool:
        """Return True if a method is called on a model, or on a call whose result is the model."""
        if id(call) in self._making:
            return True
        return isinstance(call.func, ast.Attribute) and self.is_model(call.func.value)

    def is_model(self, node: ast.expr) -> bool:
        """Return True if an expression is known to be a model."""
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
    """Return a literal's value; None for other expressions."""
    return node.value if isinstance(node, ast.Constant) else None


def is_literal(node: ast.expr | None) -> bool:
    """Return True for a literal."""
    return isinstance(node, ast.Constant)


def subject(call: ast.Call) -> ast.expr | None:
    """Return the first argument of a call, by position or by its usual keywords."""
    named = [k.value for k in call.keywords if k.arg in ("model", "obj", "x", "d")]
    return next(iter((*call.args, *named)), None)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_LEAVING = (ast.Return, ast.Continue, ast.Break, ast.Raise)


@dataclass(frozen=True, slots=True)
class Scope:
    """The place of a node: which loop it runs in, and whether it runs there every time.

    Attributes:
        unit: The innermost loop or function around it; None at the top of a module.
        sometimes: Whether it runs only on a condition inside that unit.
        open: Whether it runs only on any condition around it, or can be skipped by a conditional
            ``return``, ``continue``, ``break`` or ``raise`` before it.
    """

    unit: ast.AST | None = None
    sometimes: bool = False
    open: bool = False

    def under(self) -> Scope:
        """Return the scope of code under a condition."""
        return replace(self, sometimes=True, open=True)

    def within(self, unit: ast.AST) -> Scope:
        """Return the scope of a loop's or function's body."""
        return Scope(unit, open=self.open)


def scoped(tree: ast.Module) -> Iterator[tuple[ast.AST, Scope]]:
    """Yield each node of a module with its scope, statements in the order of the source."""
    todo: list[tuple[ast.AST, Scope]] = [*reversed(_block(tree.body, Scope()))]
    while todo:
        node, scope = todo.pop()
        yield node, scope
        todo += reversed(_inside(node, scope))


def _inside(node: ast.AST, scope: Scope) -> list[tuple[ast.AST, Scope]]:
    inner: list[tuple[ast.AST, Scope]] = []
    for name, value in ast.iter_fields(node):
        part = _scope_of(node, name, scope)
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            inner += _block(value, part)
        elif isinstance(value, list):
            # `a and b`: whether b is evaluated depends on a.
            short = isinstance(node, ast.BoolOp)
            items = [item for item in value if isinstance(item, ast.AST)]
            inner += [(item, part.under() if short and i else part) for i, item in enumerate(items)]
        elif isinstance(value, ast.AST):
            inner.append((value, part))
    return inner


def _scope_of(node: ast.AST, field: str, scope: Scope) -> Scope:
    """Return the scope of one field of a node."""
    if isinstance(node, _FUNCTIONS):
        return scope.within(node) if field == "body" else scope
    if isinstance(node, _LOOPS):
        return scope.within(node) if field == "body" else scope
    if isinstance(node, ast.If):
        return scope if field == "test" or _holds(node.test) else scope.under()
    if isinstance(node, ast.IfExp):
        return scope if field == "test" else scope.under()
    if isinstance(node, ast.Try):
        return scope.under() if field in ("handlers", "orelse") else scope
    return scope.under() if isinstance(node, ast.match_case) else scope


def _holds(test: ast.expr) -> bool:
    """Return True for a condition that is fixed when a script runs: ``__name__``, a constant."""
    match test:
        case ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")]):
            return True
    return isinstance(test, ast.Constant)


def _block(body: list[ast.stmt], scope: Scope) -> list[tuple[ast.AST, Scope]]:
    found: list[tuple[ast.AST, Scope]] = []
    for statement in body:
        found.append((statement, scope))
        if isinstance(statement, ast.If) and _leaves(statement):
            scope = replace(scope, open=True)
    return found


def _leaves(branch: ast.If) -> bool:
    return any(isinstance(last, _LEAVING) for last in (branch.body[-1], *branch.orelse[-1:]))
