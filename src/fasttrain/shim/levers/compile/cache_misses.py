"""Says why a graph isn't in inductor's cache although an earlier run of the script compiled it.

The key of a graph in the cache is made from hundreds of parts: the graph itself, the tensors,
settings, versions. Their hashes are kept beside the cache, by script and by the order in which
graphs are compiled; of one that isn't found the parts are named that differ from the last time.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.files import load, write_private
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.places import COMPILED_VARIABLE
from fasttrain.shim.hooks import patching

FOLDER = "fasttrain-keys"  # in the cache
MOST_NAMED = 4
# Source: torch 2.13, AOTAutogradCachePickler.debug_lines, "[hash] attribute[index]: value"
_LINE = re.compile(r"\[(?P<hash>[^\]]+)\] (?P<part>\w+)(?:\[(?P<of>[^\]]*)\])?:")
_WORDS = {
    "gm": "the graph",
    "example_inputs": "shapes or types of tensors",
    "aot_config": "how the model is called",
    "autograd_config": "AOTAutograd's settings",
    "cpp_runtime_thread_count": "the number of threads",
    "torch_version": "the version of torch",
    "system_info": "the device",
    "grad_enabled": "whether gradients are on",
    "default_dtype": "the default dtype",
}


@dataclass(frozen=True, slots=True)
class KeyParts:
    """The parts of the key of one graph.

    Attributes:
        hashes: The hash of each part, by its name.
    """

    hashes: dict[str, str]


class CacheMisses:
    """Watches the keys of graphs.

    Args:
        script: What the graphs belong to.
        note: Is told why one isn't in the cache.
    """

    def __init__(self, script: str, note: Callable[[str], None]) -> None:
        cache = os.environ.get(COMPILED_VARIABLE, "")
        self._folder = Path(cache, FOLDER) if cache else None
        self._script, self._note = script, note
        self._graphs = 0

    def install(self, undo: ExitStack) -> None:
        """Watch how AOTAutograd makes keys; does nothing if torch has no such function.

        Source: torch 2.13, torch/_functorch/_aot_autograd/autograd_cache.py
        """
        if self._folder is None:
            return
        with suppress(ImportError, AttributeError):
            module: Any = importlib.import_module("torch._functorch._aot_autograd.autograd_cache")
            kept = module.AOTAutogradCache._get_tmp_dir_for_key

            def make(original: Any) -> Any:
                return self._watched(original, kept)

            patching.wrap(module, "_get_debug_lines_for_cache_key", make, undo)

    def _watched(self, original: Any, kept: Callable[[str], str]) -> Any:
        def lines(pickler: Any, details: Any, key: str) -> Any:
            self._graphs += 1
            if not Path(kept(key)).exists():
                # Whatever happens here, the model is compiled.
                with suppress(Exception):
                    self._explain(pickler.debug_lines(details))
            return original(pickler, details, key)

        return lines

    def _explain(self, lines: list[str]) -> None:
        assert self._folder is not None
        name = hashlib.sha256(f"{self._script}\n{self._graphs}".encode()).hexdigest()[:24]
        path = self._folder / f"{name}.json"
        now = KeyParts(_hashes(lines))
        before = None
        with suppress(OSError, CodecError):
            before = load(KeyParts, path)
        if before is not None and (differ := differences(before.hashes, now.hashes)):
            named = differ[:MOST_NAMED]
            if len(differ) > MOST_NAMED:
                named.append(f"{len(differ) - MOST_NAMED} more")
            self._note(f"compiled again, not from the cache: {', '.join(named)} changed")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        write_private(path, dumps(now), durable=False)


def _hashes(lines: list[str]) -> dict[str, str]:
    """Return the hash of each part; those of a list, such as the tensors, together as one."""
    hashes: dict[str, str] = {}
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            continue
        setting = found["part"] == "inductor_config"
        name = f"inductor's {found['of']}" if setting else found["part"]
        name = _WORDS.get(name, name)
        hashes[name] = f"{hashes.get(name, '')}{found['hash']}"
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in hashes.items()}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the parts that differ, in the order of the key."""
    return [name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)]
