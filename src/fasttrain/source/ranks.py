"""The signs in a program's source that it handles its ranks itself."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from fasttrain.source.local_modules import Module, absolute
from fasttrain.spec.script import Evidence

# What to call, or to derive from, is to be one of several processes: the names' patterns below
# each package. Not there: torch.nn.DataParallel, which is one process.
FRAMEWORKS: Mapping[str, tuple[str, ...]] = {
    "torch.distributed": (
        *("init_process_group", "init_device_mesh", "DeviceMesh", "init_rpc"),
        *("fully_shard", "FullyShardedDataParallel"),
    ),
    "torch.nn.parallel": ("DistributedDataParallel",),
    "torch.utils.data": ("DistributedSampler",),
    "accelerate": ("Accelerator", "PartialState"),
    "apex.parallel": ("DistributedDataParallel",),
    "colossalai": ("launch*",),
    "composer": ("Trainer",),
    "deepspeed": ("initialize", "init_distributed"),
    "fairscale": ("*ShardedDataParallel", "OSS", "initialize_model_parallel"),
    "horovod": ("init", "DistributedOptimizer"),
    "ignite.distributed": ("Parallel", "initialize"),
    "lightning": ("Trainer", "Fabric", "LightningCLI"),
    "lightning_fabric": ("Fabric",),
    "mmcv": ("init_dist", "MMDistributedDataParallel"),
    "mmengine": ("Runner", "FlexibleRunner", "init_dist", "MMDistributedDataParallel"),
    "pytorch_lightning": ("Trainer", "LightningCLI", "LightningLite"),
    "sentence_transformers": ("SentenceTransformerTrainer",),
    "timm": ("init_distributed_device",),
    "transformers": ("Trainer", "Seq2SeqTrainer"),
    "trl": ("*Trainer",),
}
VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
OPTIONS = {"--local_rank", "--local-rank"}

_ENVIRONMENT = ("os.environ", "os.getenv", "os.putenv", "os.unsetenv")
_TOLD_BY_NAME_ALONE = {"torch", "accelerate"}

Chain = tuple[str, ...]  # the names of `a.b.c`


@dataclass(frozen=True, slots=True)
class _Digest:
    """What is kept of a module.

    Attributes:
        path: Its path, as it is shown.
        bound: What each name stands for, by imports and by ``name = dotted.name``.
        stars: The modules that it imports all names of.
        defined: The functions and classes that it defines.
        uses: What is called or derived from, with the line.
        variables: Uses of a rank's variable: the mapping's or function's name, variable, line.
        options: Options of a parser, with the line.
    """

    path: str
    bound: dict[str, list[str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    uses: dict[Chain, int] = field(default_factory=dict)
    variables: list[tuple[Chain, str, int]] = field(default_factory=list)
    options: list[tuple[str, int]] = field(default_factory=list)


class RankSigns:
    """Gathers the signs, module by module."""

    def __init__(self, aliases: Mapping[str, str], homonyms: set[str]) -> None:
        """Begin without any.

        Args:
            aliases: For each full name of a module, the name of the `Module` that is added; may
                grow until the strongest sign is asked for.
            homonyms: Top-level names that are the user's own and not an installed package's; may
                grow likewise.
        """
        self._aliases = aliases
        self._homonyms = homonyms
        self._digests: dict[str, _Digest] = {}

    def add(self, module: Module) -> None:
        """Take in what a module does; of equal signs, the one in an earlier module is told."""
        self._digests[module.name] = _digest(module)

    def strongest(self) -> Evidence | None:
        """Give the best sign: a framework's use, else an environment read, else an option."""
        kinds: tuple[Callable[[_Digest], Iterator[tuple[str, int]]], ...]
        kinds = (self._frameworks, self._environment, lambda digest: iter(digest.options))
        for kind in kinds:
            for digest in self._digests.values():
                for what, line in kind(digest):
                    return Evidence(what, f"{digest.path}:{line}")
        return None

    def _frameworks(self, digest: _Digest) -> Iterator[tuple[str, int]]:
        for chain, line in digest.uses.items():
            for name in self._meanings(digest, chain):
                if what := _framework(name):
                    yield what, line

    def _environment(self, digest: _Digest) -> Iterator[tuple[str, int]]:
        for chain, variable, line in digest.variables:
            for name in self._meanings(digest, chain):
                if name.startswith(_ENVIRONMENT):
                    yield f'os.environ["{variable}"]', line

    def _meanings(
        self, digest: _Digest, chain: Chain, seen: set[tuple[int, str]] | None = None
    ) -> Iterator[str]:
        """Give the full names that a chain may stand for outside the user's own modules."""
        seen = set() if seen is None else seen
        head, rest = chain[0], chain[1:]
        if (id(digest), head) in seen:  # modules that import each other
            return
        seen.add((id(digest), head))
        heads = digest.bound.get(head)
        if heads is None:
            heads = [] if head in digest.defined else [f"{star}.{head}" for star in digest.stars]
        for full in heads:
            yield from self._outside((*full.split("."), *rest), seen)

    def _outside(self, parts: Chain, seen: set[tuple[int, str]]) -> Iterator[str]:
        if parts[0] not in self._homonyms:
            yield ".".join(parts)
        for end in range(len(parts) - 1, 0, -1):
            name = self._aliases.get(".".join(parts[:end]))
            if name is not None and name in self._digests:
                yield from self._meanings(self._digests[name], parts[end:], seen)
                return


def _framework(name: str) -> str:
    """Give what to call a full name that is in the table; nothing for others."""
    for package, patterns in FRAMEWORKS.items():
        if name.startswith(package + "."):
            for part in name.removeprefix(package + ".").split("."):
                if any(fnmatchcase(part, pattern) for pattern in patterns):
                    top = name.partition(".")[0]
                    return part if top in _TOLD_BY_NAME_ALONE else f"{top}.{part}"
    return ""


def _digest(module: Module) -> _Digest:
    digest = _Digest(module.path)
    for node in module.nodes:
        _take_import(digest, node, module.package)
    imported = {name: tuple(meanings) for name, meanings in digest.bound.items()}
    for node in module.nodes:
        _take(digest, node, imported)
    return digest


def _take(digest: _Digest, node: ast.AST, imported: Mapping[str, Chain]) -> None:
    match node:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
            digest.defined.add(name)
        case ast.ClassDef(name, bases):
            digest.defined.add(name)
            for base in bases:
                _take_use(digest, base.value if isinstance(base, ast.Subscript) else base)
        case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value):
            if chain := _chain(value):
                for full in imported.get(chain[0], ()):
                    _bind(digest, name, ".".join((full, *chain[1:])))
        case ast.Call():
            _take_use(digest, node.func)
            _take_call(digest, node)
        case ast.Subscript(value, ast.Constant(key)):
            _take_variables(digest, value, [key])
        case ast.Compare(ast.Constant(key), [ast.In() | ast.NotIn()], [container]):
            _take_variables(digest, container, [key])


def _take_import(digest: _Digest, node: ast.AST, package: str) -> None:
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            _bind(digest, alias.asname or top, alias.name if alias.asname else top)
    elif isinstance(node, ast.ImportFrom):
        base = absolute(package, node.level, node.module or "")
        for alias in node.names if base else ():
            if alias.name == "*":
                digest.stars.append(base)
            else:
                _bind(digest, alias.asname or alias.name, f"{base}.{alias.name}")


def _bind(digest: _Digest, name: str, full: str) -> None:
    """Add to what a name may stand for: ``try`` and ``except`` may each import it."""
    meanings = digest.bound.setdefault(name, [])
    if full not in meanings:
        meanings.append(full)


def _take_use(digest: _Digest, used: ast.expr) -> None:
    if chain := _chain(used):
        digest.uses.setdefault(chain, used.lineno)


def _take_call(digest: _Digest, call: ast.Call) -> None:
    literals = [getattr(argument, "value", None) for argument in call.args]
    if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
        options = [literal for literal in literals if _is_in(literal, OPTIONS)]
        digest.options.extend((str(option), call.lineno) for option in options)
    keywords = [getattr(k.value, "value", None) for k in call.keywords if k.arg == "key"]
    keys = [key for argument in call.args for key in getattr(argument, "keys", ())]
    named = [getattr(key, "value", None) for key in keys] + [k.arg for k in call.keywords]
    _take_variables(digest, call.func, [*literals[:1], *keywords, *named])


def _take_variables(digest: _Digest, where: ast.expr, names: Iterable[object]) -> None:
    found = [str(name) for name in names if _is_in(name, VARIABLES)]
    if found and isinstance(where, ast.Call):  # "RANK" in os.environ.keys()
        where = where.func
    if found and (chain := _chain(where)):
        digest.variables.extend((chain, name, where.lineno) for name in found)


def _is_in(literal: object, names: set[str]) -> bool:
    return isinstance(literal, str) and literal in names


def _chain(node: ast.expr | None) -> Chain:
    """Give the names of ``a.b.c``; none for what is no such chain."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ()
    return (node.id, *reversed(names))
