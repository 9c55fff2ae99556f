"""Find and mask secrets, by the same rules in the launcher and the workers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus, unquote

from fasttrain.model.codec import from_data, to_data
from fasttrain.model.plan import LaunchPlan

T = TypeVar("T")

MASK = "***"
# Shorter values are words that any text may hold, such as the `false` of TOKENIZERS_PARALLELISM.
SHORTEST_VALUE = 6

# JWT: SLURM authenticates its users by SLURM_JWT.
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|JWT", re.IGNORECASE)
_SECRET_WORDS = frozenset(
    {"token", "key", "apikey", "secret", "password", "passwd", "passphrase", "jwt"}
)
# The password in a URL; for http(s), all of the userinfo, since a token may be given as the user.
# Source: RFC 3986, section 3.2.1, userinfo, which may contain : and '
# The scheme is limited to 40 characters, more than any has: without a limit the pattern takes
# quadratic time, minutes for 100 KB of `a.a.`
_URL = re.compile(
    r"(?P<before>\bhttps?://)(?P<web>[^\s/@\"]+)(?=@)"
    r"|(?P<user>\b[a-z][a-z0-9+.-]{0,40}://[^\s/:@\"']*:)(?P<password>[^\s/@\"]+)(?=@)",
    re.IGNORECASE,
)
# Passwords that mean that the user is a token.
# Source: https://docs.github.com/en/rest/authentication (2021), https://docs.stripe.com/api
_NO_PASSWORD = {"", "x-oauth-basic"}
# Splits a name into words: apiKey is two, as api-key and api_key are.
_WORD_ENDS = re.compile(r"[-_.]|(?<=[a-z])(?=[A-Z])")


def is_secret_name(name: str) -> bool:
    """Return whether a variable's name marks a secret, such as ``HF_TOKEN``."""
    return bool(_SECRET_NAME.search(name))


def mask_value(name: str, value: str, values: Iterable[str] = ()) -> str:
    """Return the value of a variable, masked if it is a secret.

    Args:
        name: The variable.
        value: Its value.
        values: Known secrets, from `secret_values`.
    """
    return MASK if is_secret_name(name) else hide(value, values)


def mask_args(args: Iterable[str], values: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the arguments with the values of secret options masked.

    An option is secret by the last word of its name: ``--api-key X``, ``--api-key=X`` and
    ``wandb.api_key=X``, but not ``--tokenizer``, ``--key-dim`` and ``--num-tokens``. In other
    arguments, known secrets and passwords in URLs are masked.
    """
    return tuple(_masked(args, tuple(values)))


def _masked(args: Iterable[str], values: tuple[str, ...]) -> Iterator[str]:
    expect_secret = False
    for arg in args:
        if expect_secret and not arg.startswith("--"):
            yield MASK
            expect_secret = False
            continue
        name, equals, _value = arg.partition("=")
        secret = _WORD_ENDS.split(name)[-1].lower() in _SECRET_WORDS
        expect_secret = secret and not equals and arg.startswith("-")
        yield f"{name}={MASK}" if secret and equals else hide(arg, values)


def secret_values(environ: Mapping[str, str], args: Iterable[str]) -> tuple[str, ...]:
    """Return the values of secret variables and arguments, and passwords in URLs; longest first."""
    args = tuple(args)
    values = {value for name, value in environ.items() if is_secret_name(name)}
    for arg, masked in zip(args, mask_args(args), strict=True):
        if arg != masked and masked.endswith(MASK):
            values.add(arg if masked == MASK else arg.partition("=")[2])
    for text in (*environ.values(), *args):
        values.update(_of_url(found) for found in _URL.finditer(text))
    values |= {unquote(value) for value in values}
    values |= {form for value in values for form in _forms(value)}
    # Longest first: a short secret may be a part of a longer one, whose rest would stay readable.
    return tuple(sorted((v for v in values if len(v) >= SHORTEST_VALUE), key=len, reverse=True))


def secrets_of(plan: LaunchPlan, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secrets of a run: in the user's environment, ``--env`` and its arguments."""
    named = {v.name: v.value for v in plan.environment if v.value is not None}
    return secret_values({**environ, **named}, plan.target.args)


def hide(text: str, values: Iterable[str]) -> str:
    """Return a text with these values masked, and with any password in a URL."""
    for value in values:
        text = text.replace(value, MASK)
    return _URL.sub(lambda found: (found["before"] or found["user"]) + MASK, text)


def _of_url(found: re.Match[str]) -> str:
    if found["web"] is None:
        return found["password"]
    user, _, password = found["web"].partition(":")
    return user if password in _NO_PASSWORD else password


def _forms(value: str) -> set[str]:
    """Return the escaped forms of a text, in a URL and in a message that quotes it."""
    quoted = {quote(value), quote(value, safe=""), quote_plus(value)}
    return quoted | {repr(value)[1:-1], json.dumps(value)[1:-1]}


def without_secrets(kind: type[T], value: T, values: Iterable[str]) -> T:
    """Return a dataclass with these values masked in all of its texts."""
    return from_data(kind, _hidden(to_data(value), tuple(values)))


def _hidden(data: Any, values: tuple[str, ...]) -> Any:
    if isinstance(data, str):
        return hide(data, values)
    if isinstance(data, list):
        return [_hidden(item, values) for item in data]
    if isinstance(data, dict):
        return {name: _hidden(item, values) for name, item in data.items()}
    return data
