"""The generated completions, in the real shells."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fasttrain.cli.completions import generate

COMPLETIONS = Path(__file__).parents[2] / "completions"


def shell(program, *args):
    assert shutil.which(program), f"{program} is missing; apt-get install {program}"
    return subprocess.run(
        [program, *args], capture_output=True, text=True, check=True, timeout=240
    ).stdout


def test_the_files_are_what_the_command_line_generates():
    generated = generate()
    kept = {path.name: path.read_text() for path in COMPLETIONS.iterdir()}
    assert kept == generated, "run: python -m fasttrain.cli.completions completions"


def bash_words(*words):
    script = f"""
        source {COMPLETIONS / "fasttrain.bash"}
        COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
        _fasttrain; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    return shell("bash", "-c", script).split()


def fish_words(line):
    script = f"source {COMPLETIONS / 'fasttrain.fish'}; complete -C '{line}'"
    return {row.split("\t")[0] for row in shell("fish", "--no-config", "-c", script).splitlines()}


def test_bash_completes_commands_options_and_values():
    assert bash_words("fasttrain", "r") == ["run", "report"]
    assert bash_words("fasttrain", "run", "--comp") == ["--compile", "--compile-scope"]
    assert bash_words("fasttrain", "run", "train.py", "--amp", "b") == ["bf16"]


def test_bash_leaves_the_words_of_the_script_alone():
    assert bash_words("fasttrain", "run", "train.py", "--", "--am") == []
    assert bash_words("fasttrain", "run", "tra") == []


def test_fish_completes_options_and_values():
    assert fish_words("fasttrain run --comp") == {"--compile", "--compile-scope"}
    assert fish_words("fasttrain run --amp ") == {"auto", "off", "bf16", "fp16"}


@pytest.mark.parametrize(("line", "expected"), [("--max-s", "--max-steps"), ("--amp b", "bf16")])
def test_zsh_completes_options_and_values(tmp_path, line, expected):
    (tmp_path / "_fasttrain").write_text((COMPLETIONS / "_fasttrain").read_text())
    driver = f"""
        zmodload zsh/zpty
        zpty z zsh -f -i
        zpty -w z 'fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -D; PS1=READY'
        zpty -w z 'bindkey "^I" complete-word; zstyle ":completion:*" menu no; fasttrain() {{ }}'
        sleep 1
        zpty -n -w z $'fasttrain run {line}\\t'
        sleep 2
        zpty -w z ''
        sleep 0.5
        zpty -r -t z out '*' && true
        while zpty -r -t z more; do out+=$more; done
        print -r -- $out
    """
    assert expected in shell("zsh", "-f", "-c", driver)
