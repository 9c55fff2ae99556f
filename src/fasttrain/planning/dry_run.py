"""Renders a plan as a POSIX shell script that can be read, pasted and run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote

from fasttrain.model.codec import dumps
from fasttrain.model.errors import printable
from fasttrain.model.plan import PLAN_FILE, EnvVar, LaunchPlan
from fasttrain.model.secrets import MASK, hide, is_secret_name, secrets_of
from fasttrain.planning.explain import lever_rows
from fasttrain.planning.secrets import mask_plan

SET_FIRST = "its value is not printed; set it first"

_END = "FASTTRAIN_PLAN"


def shell_script(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    r"""Give the script: decisions as comments, the environment, the plan file and the command.

    Secrets are not printed; the script asks for them instead. Arguments that are no valid UTF-8
    are in it as lone surrogates, so it must be written with ``errors="surrogateescape"``.
    Everything happens in a sub-shell: pasting it leaves the shell as it was.

    Args:
        plan: The plan to render.
        environ: The environment as the user has it, to say what a variable was before.
    """
    masked = mask_plan(plan, environ)
    lines = [
        "#!/bin/sh",
        *_header(masked),
        "(",
        "set -e",
        *_variables(plan, masked, environ),
        *_plan_file(masked),
        f"cd -- {quote(plan.cwd)}",
        f"exec {' '.join(_words(plan.argv, masked.argv))}",
        ")",
    ]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    return f"# {printable(text)}"


def _header(plan: LaunchPlan) -> Iterator[str]:
    yield _comment(f"fasttrain {plan.fasttrain_version}, run {plan.run_id}")
    cells = [(row.topic, row.value, f"{row.reason} ({row.source})") for row in lever_rows(plan)]
    topics, values = (max(map(len, column)) for column in [*zip(*cells, strict=True)][:2])
    for topic, value, why in cells:
        yield _comment(f"{topic:{topics}}  {value:{values}}  {why}")
    for warning in plan.warnings:
        yield _comment(f"warning: {warning}")
    for hint in plan.hints:
        yield _comment(f"hint: {hint}")


def _variables(plan: LaunchPlan, masked: LaunchPlan, environ: Mapping[str, str]) -> Iterator[str]:
    values = secrets_of(plan, environ)
    for variable, shown in zip(plan.environment, masked.environment, strict=True):
        before = hide(_before(variable, environ), values)
        yield _variable(shown, before, secret=shown.value != variable.value)


def _variable(variable: EnvVar, before: str, *, secret: bool) -> str:
    why = _comment(f"{variable.reason} ({variable.source}){before}")
    if variable.kept:
        return _comment(f"{variable.name}={variable.value} stays: ") + why.removeprefix("# ")
    name = quote(variable.name)
    if variable.value is None:
        return f"unset {name}  {why}"
    if secret:
        ask = f': "${{{variable.name}:?{SET_FIRST}}}"'
        return f"{ask}  {why}\nexport {name}"
    return f"export {name}={quote(variable.value)}  {why}"


def _before(variable: EnvVar, environ: Mapping[str, str]) -> str:
    before = environ.get(variable.name)
    known = is_secret_name(variable.name) or before == variable.value
    if before is None or variable.kept or known:
        return ""
    return f", was {before}"


def _plan_file(plan: LaunchPlan) -> Iterator[str]:
    path = quote(f"{plan.run_dir}/{PLAN_FILE}")
    # Only these files are private: the script's own keep the umask of the shell.
    yield f"(umask 077; mkdir -p -- {quote(plan.run_dir)}; cat > {path}) <<'{_END}'"
    # JSON in ASCII: no line of it can end the here-document, whatever the strings hold.
    yield dumps(plan)
    yield _END


def _words(argv: tuple[str, ...], masked: tuple[str, ...]) -> Iterator[str]:
    for index, (word, shown) in enumerate(zip(argv, masked, strict=True)):
        if word == shown:
            yield quote(word)
            continue
        ask = f"${{SECRET_{index}:?an argument is not printed; set SECRET_{index} to it first}}"
        before = shown.removesuffix(MASK)
        split = shown.endswith(MASK) and word.startswith(before) and MASK not in before
        yield f'{quote(before)}"{ask}"' if split and before else f'"{ask}"'
