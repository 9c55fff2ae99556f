"""Keep a run's secrets out of its directory: the job's environment carries them to the nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fasttrain.model.decision import Setting
from fasttrain.model.job import SECRETS_VARIABLE, JobRequest
from fasttrain.model.secrets import MASK, is_secret_name, mask_args, mask_value
from fasttrain.model.settings import Settings


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secrets of a request.

    Attributes:
        env: Values of ``--env``, by name.
        args: Arguments of the script, by index.
    """

    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)


def masked(request: JobRequest, values: tuple[str, ...] = ()) -> tuple[JobRequest, dict[str, str]]:
    """Return the request without its secrets, and the variable that carries them, if any.

    Args:
        request: The request.
        values: Known secrets, besides those that are recognised by name.
    """
    args = mask_args(request.target.args, values)
    shown = {name: mask_value(name, value, values) for name, value in _env(request.settings)}
    hidden = Secrets(
        {name: value for name, value in _env(request.settings) if shown[name] != value},
        {
            str(index): word
            for index, (word, shown) in enumerate(zip(request.target.args, args, strict=True))
            if word != shown
        },
    )
    if not hidden.env and not hidden.args:
        return request, {}
    entries = tuple(
        f"{name}={shown[name] if name in hidden.env else value}"
        for name, value in _env(request.settings)
    )
    shown_request = replace(
        request,
        target=replace(request.target, args=args),
        settings=_with_env(request.settings, entries),
    )
    carried = {"env": hidden.env, "args": hidden.args}
    return shown_request, {SECRETS_VARIABLE: json.dumps(carried)}


def unmasked(request: JobRequest, environ: Mapping[str, str]) -> JobRequest:
    """Return the request with its secrets, which the job's environment carries.

    Raises:
        ValueError: If something was masked, and the variable is missing or malformed.
    """
    carried = json.loads(environ.get(SECRETS_VARIABLE) or '{"env": {}, "args": {}}')
    env, args = carried["env"], carried["args"]
    entries = tuple(f"{name}={env.get(name, value)}" for name, value in _env(request.settings))
    words = tuple(args.get(str(i), word) for i, word in enumerate(request.target.args))
    if any(_is_masked(*pair) and pair[0] not in env for pair in _env(request.settings)):
        raise ValueError(f"{SECRETS_VARIABLE} is not in the job's environment")
    return replace(
        request,
        target=replace(request.target, args=words),
        settings=_with_env(request.settings, entries),
    )


def _is_masked(name: str, value: str) -> bool:
    return is_secret_name(name) or (MASK in value and "://" in value)


def _env(settings: Settings) -> list[tuple[str, str]]:
    pairs = (entry.partition("=") for entry in settings.env.value)
    return [(name, value) for name, _, value in pairs]


def _with_env(settings: Settings, entries: tuple[str, ...]) -> Settings:
    return replace(settings, env=Setting(entries, settings.env.source))
