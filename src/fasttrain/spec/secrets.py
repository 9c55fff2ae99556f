"""What counts as a secret, for the launcher and the workers alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

MASK = "***"
# Shorter values are words such as the `false` of TOKENIZERS_PARALLELISM, which a text may hold.
SHORTEST_VALUE = 6

# JWT: SLURM_JWT is how SLURM knows its users.
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|JWT", re.IGNORECASE)
_SECRET_WORDS = frozenset({"token", "key", "apikey", "secret", "password", "passwd"})
# apiKey counts as two words, as api-key and api_key do.
_WORD_ENDS = re.compile(r"[-_.]|(?<=[a-z])(?=[A-Z])")


def is_secret_name(name: str) -> bool:
    """Say whether a variable's name tells of a secret, such as ``HF_TOKEN``."""
    return bool(_SECRET_NAME.search(name))


def mask_args(args: Iterable[str]) -> tuple[str, ...]:
    """Give the arguments with the values of secret options masked.

    Both ``--api-key X`` and ``--api-key=X`` are known, and ``wandb.api_key=X``; by its last word,
    so that ``--tokenizer``, ``--key-dim`` and ``--num-tokens`` keep theirs.
    """
    return tuple(_masked(args))


def _masked(args: Iterable[str]) -> Iterator[str]:
    expect_secret = False
    for arg in args:
        if expect_secret and not arg.startswith("--"):
            yield MASK
            expect_secret = False
            continue
        name, equals, _value = arg.partition("=")
        secret = _WORD_ENDS.split(name)[-1].lower() in _SECRET_WORDS
        expect_secret = secret and not equals and arg.startswith("-")
        yield f"{name}={MASK}" if secret and equals else arg


def secret_values(environ: Mapping[str, str], args: Iterable[str]) -> tuple[str, ...]:
    """Give the values of secret variables and arguments, longest first."""
    args = tuple(args)
    values = {value for name, value in environ.items() if is_secret_name(name)}
    for arg, masked in zip(args, mask_args(args), strict=True):
        if arg != masked:
            values.add(arg if masked == MASK else arg.partition("=")[2])
    return tuple(sorted((v for v in values if len(v) >= SHORTEST_VALUE), key=len, reverse=True))


def hide(text: str, values: Iterable[str]) -> str:
    """Give a text with these values masked."""
    for value in values:
        text = text.replace(value, MASK)
    return text
