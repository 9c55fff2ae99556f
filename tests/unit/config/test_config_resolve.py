from pathlib import Path

import pytest

from fasttrain.config.resolve import resolve
from fasttrain.model.decision import SourceKind
from fasttrain.model.settings import Settings


def told(setting) -> tuple[object, str]:
    return setting.value, str(setting.source)


def test_nothing_said_gives_the_defaults(tmp_path):
    resolved = resolve({}, environ={"HOME": "/"}, cwd=tmp_path)
    assert resolved.settings == Settings()
    assert (resolved.script, resolved.with_args, resolved.config_path) == (None, (), None)


LAYERS = ["flag", "env", "file", "preset"]
SAID = {
    "flag": ("reduce-overhead", "--compile"),
    "env": ("max-autotune", "FASTTRAIN_COMPILE"),
    "file": ("max-autotune-no-cudagraphs", "fasttrain.yaml:2"),
    "preset": ("default", "preset fast"),
}


@pytest.mark.parametrize("strongest", range(len(LAYERS)))
def test_the_strongest_layer_wins(tmp_path, strongest):
    present = LAYERS[strongest:]
    if "file" in present:
        text = f"\ncompile: {SAID['file'][0]}\n"
        (tmp_path / "fasttrain.yaml").write_text(text)
    resolved = resolve(
        {"compile": SAID["flag"][0]} if "flag" in present else {},
        environ={"FASTTRAIN_COMPILE": SAID["env"][0]} if "env" in present else {},
        cwd=tmp_path,
        preset="fast",
    )
    assert told(resolved.settings.compile) == SAID[LAYERS[strongest]]
    assert resolved.settings.compile.source.kind is SourceKind(LAYERS[strongest])


def test_a_flag_that_was_not_given_and_an_empty_key_say_nothing(tmp_path):
    (tmp_path / "fasttrain.yaml").write_text("max_steps:\nenv:\n")
    settings = resolve({"gpus": None, "amp": None}, environ={}, cwd=tmp_path).settings
    assert settings == Settings()


def test_a_flag_may_switch_off_what_the_file_switches_on(tmp_path):
    (tmp_path / "fasttrain.yaml").write_text("strict: on\n")
    assert resolve({}, environ={}, cwd=tmp_path).settings.strict.value is True
    assert told(resolve({"strict": False}, environ={}, cwd=tmp_path).settings.strict) == (
        False,
        "--strict",
    )


def test_env_lists_merge_by_name(tmp_path):
    (tmp_path / "fasttrain.yaml").write_text("env: {A: file, B: file, C: file}\n")
    env = resolve(
        {"env": ("A=flag", "D=first", "D=last")},
        environ={"FASTTRAIN_ENV": "A=env B=env"},
        cwd=tmp_path,
    ).settings.env
    assert set(env.value) == {"A=flag", "B=env", "C=file", "D=last"}
    assert len(env.value) == 4
    assert told(env)[1] == "--env, FASTTRAIN_ENV, fasttrain.yaml:1"
    assert env.source.kind is SourceKind.FLAG


@pytest.mark.parametrize("name", ["fasttrain.yaml", "fasttrain.yml"])
def test_the_file_of_the_directory_is_found(tmp_path, name):
    (tmp_path / name).write_text("script: train.py\nargs: [--lr, 0.10]\namp: bf16\n")
    resolved = resolve({}, environ={}, cwd=tmp_path)
    (file,) = resolved.with_args
    assert (resolved.script, file.args, file.args_line) == ("train.py", ("--lr", "0.10"), 2)
    assert resolved.config_path == tmp_path / name
    assert told(resolved.settings.amp) == ("bf16", f"{name}:3")


def test_both_file_names_are_ambiguous(tmp_path, refused):
    for name in ("fasttrain.yaml", "fasttrain.yml"):
        (tmp_path / name).touch()
    with refused("config-ambiguous", "fasttrain.yaml", "fasttrain.yml"):
        resolve({}, environ={}, cwd=tmp_path)
    assert resolve({}, environ={}, cwd=tmp_path, config="fasttrain.yml").config_path


def test_config_flag_beats_variable_beats_directory(tmp_path):
    (tmp_path / "conf").mkdir()
    for name, amp in [("conf/a.yaml", "bf16"), ("b.yaml", "fp16"), ("fasttrain.yaml", "off")]:
        (tmp_path / name).write_text(f"amp: {amp}\n")

    def amp(environ: dict[str, str], config: str | None) -> tuple[object, str]:
        return told(resolve({}, environ=environ, cwd=tmp_path, config=config).settings.amp)

    variable = {"FASTTRAIN_CONFIG": "b.yaml"}
    assert amp(variable, "conf/a.yaml") == ("bf16", "conf/a.yaml:1")
    assert amp(variable, None) == ("fp16", "b.yaml:1")
    assert amp({"FASTTRAIN_CONFIG": ""}, None) == ("off", "fasttrain.yaml:1")
    absolute = str(tmp_path / "b.yaml")
    assert amp({}, absolute) == ("fp16", f"{absolute}:1")


def test_an_empty_device_stands_for_no_file(tmp_path):
    (tmp_path / "fasttrain.yaml").write_text("amp: bf16\n")
    resolved = resolve({}, environ={}, cwd=tmp_path, config="/dev/null")
    assert resolved.settings == Settings()
    assert resolved.config_path == Path("/dev/null")


def test_preset_flag_beats_variable_beats_file(tmp_path):
    (tmp_path / "fasttrain.yaml").write_text("preset: max\n")

    def source(environ: dict[str, str], preset: str | None) -> str:
        settings = resolve({}, environ=environ, cwd=tmp_path, preset=preset).settings
        return str(settings.compile.source)

    assert source({"FASTTRAIN_PRESET": "fast"}, "exact") == "preset exact"
    assert source({"FASTTRAIN_PRESET": "fast"}, None) == "preset fast"
    assert source({"FASTTRAIN_PRESET": ""}, None) == "preset max"


@pytest.mark.parametrize(
    ("content", "slug", "words"),
    [
        ("amp: bf61", "option-value", ["fasttrain.yaml:1: amp", "bf16?"]),
        ("amp: {a: b}", "option-value", ["fasttrain.yaml:1: amp"]),
        ("\nmax-steps: many", "option-value", ["fasttrain.yaml:2: max_steps"]),
        ("env: [A]", "env-value", ["fasttrain.yaml:1: env"]),
        ("\npreset: exakt", "preset", ["fasttrain.yaml:2", "exact?"]),
    ],
)
def test_errors_of_the_file_name_the_line(tmp_path, refused, content, slug, words):
    (tmp_path / "fasttrain.yaml").write_text(content)
    with refused(slug, *words):
        resolve({}, environ={}, cwd=tmp_path)


def test_errors_of_named_files_presets_and_flags(tmp_path, refused):
    with refused("config-missing", "gone.yaml"):
        resolve({}, environ={}, cwd=tmp_path, config="gone.yaml")
    with refused("config-missing", "gone.yaml"):
        resolve({}, environ={"FASTTRAIN_CONFIG": "gone.yaml"}, cwd=tmp_path)
    with refused("config-missing", "directory"):
        resolve({}, environ={"FASTTRAIN_CONFIG": "gone.yaml"}, cwd=tmp_path, config="")
    with refused("preset", "--preset", code=2):
        resolve({}, environ={}, cwd=tmp_path, preset="exakt")
    with refused("preset", "FASTTRAIN_PRESET"):
        resolve({}, environ={"FASTTRAIN_PRESET": "exakt"}, cwd=tmp_path)
    with refused("option-value", "--max-steps", code=2):
        resolve({"max_steps": 0}, environ={}, cwd=tmp_path)
    with refused("env-option"):
        resolve({}, environ={"FASTTRAIN_AMPP": "bf16"}, cwd=tmp_path)


def test_a_weaker_layer_is_checked_even_when_it_is_overruled(tmp_path, refused):
    (tmp_path / "fasttrain.yaml").write_text("amp: bf61\n")
    with refused("option-value"):
        resolve({"amp": "bf16"}, environ={}, cwd=tmp_path)


def test_the_file_beside_the_script_counts_before_the_one_here(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "fasttrain.yml").write_text("amp: bf16\npreset: max\n")
    (tmp_path / "fasttrain.yaml").write_text("amp: fp16\nmax_steps: 3\npreset: exact\n")
    found = resolve({}, environ={}, cwd=tmp_path, beside=Path("sub")).settings
    assert told(found.amp) == ("bf16", "sub/fasttrain.yml:1")
    assert told(found.max_steps) == (3, "fasttrain.yaml:2")
    assert found.compile.value != "off", "the preset is that of the nearer file"
    named = resolve({}, environ={}, cwd=tmp_path, beside=Path("sub"), config="fasttrain.yaml")
    assert told(named.settings.amp) == ("fp16", "fasttrain.yaml:1")


def test_a_profile_of_either_file_can_be_named(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "fasttrain.yaml").write_text("slurm:\n  cluster: big\n  account: mine\n")
    text = "slurm:\n  clusters:\n    big:\n      partition: gpu\n"
    (tmp_path / "fasttrain.yaml").write_text(text)
    found = resolve({}, environ={}, cwd=tmp_path, beside=Path("sub"), slurm=True).slurm
    assert (found.partition.value, found.account.value) == ("gpu", "mine")


def test_a_script_here_has_the_file_read_once(tmp_path):
    (tmp_path / "fasttrain.yaml").write_text("env: [A=1]\n")
    found = resolve({}, environ={}, cwd=tmp_path, beside=tmp_path).settings
    assert told(found.env) == (("A=1",), "fasttrain.yaml:1")
