"""Notices each batch that a DataLoader returns.

A descriptor takes the place of its iterators' counter. A wrapper around ``__next__`` would put a
frame of fasttrain's into the traceback of a batch that can't be read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.dynamo_skip import pass_over

_COUNTER = "_num_yielded"  # of DataLoader iterators from torch 1.4 on
Listen = Callable[[Any, Any], None]


def on_batch(listen: Listen, undo: ExitStack) -> None:
    """Call ``listen`` for each batch, with the iterator and what it is about to return."""
    counter = vars(_BaseDataLoaderIter).get(_COUNTER)
    if not isinstance(counter, _Counter):
        for function in (_Counter.__get__, _Counter.__set__):
            pass_over(function, all_it_calls=True)
        counter = _Counter()
        gone = ExitStack()
        patching.put(_BaseDataLoaderIter, _COUNTER, counter, gone)
        counter.gone = gone.close
    counter.listeners.append(listen)
    undo.callback(counter.leave, listen)


class _Counter:
    """Holds the count of each iterator in the iterator itself."""

    def __init__(self) -> None:
        self.listeners: list[Listen] = []
        self.gone: Callable[[], None] = lambda: None  # takes it away again

    def leave(self, listen: Listen) -> None:
        self.listeners.remove(listen)
        if not self.listeners:
            self.gone()

    def __get__(self, iterator: Any, owner: Any) -> Any:
        return self if iterator is None else vars(iterator)[_COUNTER]

    def __set__(self, iterator: Any, value: int) -> None:
        vars(iterator)[_COUNTER] = value
        if not value:
            return  # the iterator is new, or begins another epoch
        # A local variable of __next__, up to torch 2.13; None if another version renames it.
        data = sys._getframe(1).f_locals.get("data")
        for listen in self.listeners:
            listen(iterator, data)
