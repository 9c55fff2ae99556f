"""Finds the blocks that a model repeats, which are compiled once and sharded one by one."""

from __future__ import annotations

from collections import defaultdict

from torch.nn import Module, ModuleList, Sequential


def repeated_blocks(module: Module) -> list[Module]:
    """Give the modules of which a ModuleList or Sequential holds several of the same class."""
    found: list[Module] = []
    for container in module.modules():
        if not isinstance(container, ModuleList | Sequential):
            continue
        by_class: defaultdict[type, list[Module]] = defaultdict(list)
        for child in container.children():
            if any(True for _ in child.children()):  # a lone Linear or ReLU is no block
                by_class[type(child)].append(child)
        for blocks in by_class.values():
            if len(blocks) > 1:
                found.extend(blocks)
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]
