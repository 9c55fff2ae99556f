"""Find the signs in a program's source that it handles its ranks itself."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fasttrain.model.plan import Evidence
from fasttrain.source.local_modules import Module
from fasttrain.source.names import Chain, Names, chain, part_of

# Whoever calls one of these, or derives from it, handles ranks: patterns for names inside each
# package. torch.nn.DataParallel is not here, since it is one process.
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
_SHOWN_WITHOUT_PACKAGE = {"torch", "accelerate"}


@dataclass(frozen=True, slots=True)
class _Digest:
    """The possible signs in a module, kept until all names can be resolved.

    Attributes:
        path: Its path, as shown to the user.
        uses: The names that are called or derived from, with the line.
        variables: Uses of a rank's variable: name of the mapping or function, variable, line.
        options: Options of a parser, with the line.
    """

    path: str
    uses: dict[Chain, int] = field(default_factory=dict)
    variables: list[tuple[Chain, str, int]] = field(default_factory=list)
    options: list[tuple[str, int]] = field(default_factory=list)


class RankSigns:
    """Collects the signs, module by module."""

    def __init__(self, names: Names) -> None:
        """Start without any sign; `names` must know all modules before a sign is asked for."""
        self._names = names
        self._digests: dict[str, _Digest] = {}

    def add(self, module: Module) -> None:
        """Add the signs of a module; of equal signs, the one of the earliest module counts."""
        digest = self._digests[module.name] = _Digest(module.path)
        for node in module.nodes:
            _take(digest, node)

    def strongest(self) -> Evidence | None:
        """Return the best sign: a framework, else a read of the environment, else an option."""
        for kind in (self._frameworks, self._environment, self._options):
            for module, digest in self._digests.items():
                for what, line in kind(module, digest):
                    return Evidence(what, f"{digest.path}:{line}")
        return None

    def local_rank(self) -> Evidence | None:
        """Return the first place that reads the local rank, the environment before an option."""
        for kind in (self._environment, self._options):
            for module, digest in self._digests.items():
                for what, line in kind(module, digest):
                    if "local" in what.lower():
                        return Evidence(what, f"{digest.path}:{line}")
        return None

    def _frameworks(self, module: str, digest: _Digest) -> Iterator[tuple[str, int]]:
        for names, line in digest.uses.items():
            for name in self._names.meanings(module, names):
                if what := _framework(name):
                    yield what, line

    def _environment(self, module: str, digest: _Digest) -> Iterator[tuple[str, int]]:
        for names, variable, line in digest.variables:
            for name in self._names.meanings(module, names):
                if name.startswith(_ENVIRONMENT):
                    yield f'os.environ["{variable}"]', line

    def _options(self, _module: str, digest: _Digest) -> Iterator[tuple[str, int]]:
        yield from digest.options


def _framework(name: str) -> str:
    """Return the short name of a full name that is in the table; empty for others."""
    for package, patterns in FRAMEWORKS.items():
        if part := part_of([name], package, patterns):
            top = name.partition(".")[0]
            return part if top in _SHOWN_WITHOUT_PACKAGE else f"{top}.{part}"
    return ""


def _take(digest: _Digest, node: ast.AST) -> None:
    match node:
        case ast.ClassDef(_, bases):
            for base in bases:
                _take_use(digest, base.value if isinstance(base, ast.Subscript) else base)
        case ast.Call():
            _take_use(digest, node.func)
            _take_call(digest, node)
        case ast.Subscript(value, ast.Constant(key)):
            _take_variables(digest, value, [key])
        case ast.Compare(ast.Constant(key), [ast.In() | ast.NotIn()], [container]):
            _take_variables(digest, container, [key])


def _take_use(digest: _Digest, used: ast.expr) -> None:
    if names := chain(used):
        digest.uses.setdefault(names, used.lineno)


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
    if found and (of := chain(where)):
        digest.variables.extend((of, name, where.lineno) for name in found)


def _is_in(literal: object, names: set[str]) -> bool:
    return isinstance(literal, str) and literal in names
