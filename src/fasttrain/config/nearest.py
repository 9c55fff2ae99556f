"""The known word that a misspelt one was most likely meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most like `word`, or None when none is near.

    Neither case counts, nor the dashes of options, which would make any two short ones look alike.
    """
    folded = {_folded(candidate): candidate for candidate in candidates}
    matches = get_close_matches(_folded(word), folded, n=1)
    return folded[matches[0]] if matches else None


def _folded(word: str) -> str:
    return word.casefold().lstrip("-")


def suggest(word: str, candidates: Iterable[str], otherwise: str) -> str:
    """Give the text of a fix: the nearest candidate as a question, or else `otherwise`."""
    match = nearest(word, candidates)
    return f"did you mean {match}?" if match else otherwise
