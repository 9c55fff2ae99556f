import os
import threading
import time
from pathlib import Path

import pytest

from fasttrain.config.yaml_file import MAX_BYTES, NO_ANCHORS, NOBODY_WRITES, NOT_A_WORD, read_yaml

EXAMPLE = """\
# a comment
script: tools/train.py
args: [configs/a.yaml, --lr, 1e-3, 010, yes, 12:30, "", "a b; c"]
preset: fast

amp: off
compile-scope: blocks
nodes: 1:4
gpus: 0,3
env:
  OMP_NUM_THREADS: 08
  FLAG: on
max_steps:
"""


def test_values_are_the_text_as_written_with_their_lines(load):
    file = load(EXAMPLE)
    assert file.entries == {
        "amp": ("off", 6),
        "compile_scope": ("blocks", 7),
        "nodes": ("1:4", 8),
        "gpus": ("0,3", 9),
        "env": ({"OMP_NUM_THREADS": "08", "FLAG": "on"}, 10),
        "max_steps": (None, 13),
    }
    assert (file.script, file.preset, file.preset_line) == ("tools/train.py", "fast", 4)
    assert file.args == ("configs/a.yaml", "--lr", "1e-3", "010", "yes", "12:30", "", "a b; c")


@pytest.mark.parametrize("content", ["", "\n# only a comment\n", "---\n", "~", "{}", "\ufeff"])
def test_an_empty_file_sets_nothing(load, content):
    file = load(content)
    assert (file.entries, file.script, file.args, file.preset) == ({}, None, (), None)


def test_a_byte_order_mark_is_skipped(load):
    assert load("\ufeffamp: bf16").entries == {"amp": ("bf16", 1)}


def test_empty_script_and_args_count_as_absent(load):
    file = load("script:\nargs:\n")
    assert (file.script, file.args) == (None, ())


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("amp: [bf16\n", 2),
        ("amp: bf16\n\tcompile: off\n", 2),
        ("amp: bf16\n---\namp: off\n", 2),
        ("amp: bf16\ngpus: '0\n", 3),
        ("a: b: c", 1),
        (b"amp: bf16\ngpus: \xff\xfe\n", 2),
        (b"\x00\x01\x02", 1),
        ("amp: bf16\ngpus: \x07\n", 2),
        ('amp: bf16\nrun_dir: "a\\0b"\n', 2),
        ('amp: bf16\nrun_dir: "\\uD800"\n', 2),
        ('run_dir: "\\UFFFFFFFF"', 1),
        ('run_dir: "\\U00110000"', 1),
        ("amp: &a bf16\n", 1),
        ("amp: bf16\ncompile: *a\n", 2),
        ("amp: !!python/object/apply:os.system [exit]", 1),
        ("amp: bf16\nenv: !!binary aGk=", 2),
        ("amp: !!null bf16", 1),
        ("args: " + "[" * 50 + "]" * 50, 1),
        # The document, "args" and the list leave 19,997 of 20,000 values from line 2 on.
        ("args:\n" + "- a\n" * 30_000, 19_999),
    ],
)
def test_text_that_is_not_plain_yaml_is_refused_with_its_line(load, refused, content, line):
    with refused("config-syntax", f"fasttrain.yaml:{line}:"):
        load(content)


def test_a_billion_laughs_are_not_expanded(load, refused):
    lines = [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
    with refused("config-syntax", NO_ANCHORS):
        load("\n".join(["a0: &a0 [x, x]", *lines]))


def test_size_is_limited(load, refused):
    assert load("#" * MAX_BYTES).entries == {}
    with refused("config-syntax", "1 MiB"):
        load("#" * (MAX_BYTES + 1))


@pytest.mark.parametrize("content", ["amp", "- amp", "amp:bf16", "42"])
def test_the_top_level_is_a_mapping(load, refused, content):
    with refused("config-mapping", "fasttrain.yaml:2"):
        load("# first\n" + content)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("amp: bf16\ncomplie: default", ["fasttrain.yaml:2", "compile?"]),
        ("scirpt: train.py", ["script?"]),
        ("quantum: 1", ["fasttrain run --help"]),
        ("1: 2", ["'1'"]),
        ("? [amp]\n: bf16", ["fasttrain.yaml:1", NOT_A_WORD]),
        ("<<: {amp: bf16}", ["'<<'"]),
        ("amp: bf16\namp: off", ["fasttrain.yaml:2", "line 1"]),
        ("compile-scope: model\ncompile_scope: blocks", ["yaml:2: compile_scope ", "line 1"]),
        ("env: {A: 1, A: 2}", ["yaml:1: A ", "line 1"]),
        ("? " + "x" * 3000 + "\n: 1", ["xxx..."]),
    ],
)
def test_keys_are_known_and_said_once(load, refused, content, words):
    with refused("config-key", *words):
        load(content)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("script: [a, b]", 1),
        ("amp: bf16\nscript: ''", 2),
        ("preset: {a: b}", 1),
        ("args: --lr 0.1", 1),
        ("args: {lr: 0.1}", 1),
        ("args:\n  - --lr\n  - [0.1]", 3),
        ("args:\n  - --lr\n  -\n", 3),
    ],
)
def test_script_args_and_preset_have_their_types(load, refused, content, line):
    with refused("option-value", f"fasttrain.yaml:{line}"):
        load(content)


def test_a_file_that_cannot_be_read(tmp_path, refused):
    with refused("config-missing", "No such file"):
        read_yaml(tmp_path / "none.yaml")
    with refused("config-missing", "directory", str(tmp_path)):
        read_yaml(tmp_path)


def test_a_file_that_fails_while_it_is_read(refused):
    with refused("config-missing"):
        read_yaml(Path("/proc/self/mem"))  # opens for everyone, root too, and can't be read at 0


def test_a_pipe_and_an_endless_device_are_read_bounded(tmp_path, refused):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("amp: bf16",), daemon=True)
    writer.start()
    assert read_yaml(pipe).entries == {"amp": ("bf16", 1)}
    writer.join()
    with refused("config-syntax"):
        read_yaml(Path("/dev/zero"))


def test_a_pipe_to_which_nobody_writes_is_refused_in_time(tmp_path, refused, monkeypatch):
    monkeypatch.setattr("fasttrain.config.yaml_file.WRITER_S", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with refused("config-missing", NOBODY_WRITES):
        read_yaml(pipe)


def test_a_shell_s_own_pipe_is_waited_for(tmp_path):
    ours, theirs = os.pipe()
    writer = threading.Timer(0.2, lambda: (os.write(theirs, b"amp: bf16"), os.close(theirs)))
    writer.start()
    assert read_yaml(Path(f"/dev/fd/{ours}")).entries == {"amp": ("bf16", 1)}
    writer.join()
    os.close(ours)


@pytest.mark.parametrize("unit", ["[", "{", "- ", "? ", "a, ", "'", "a: ", "\n- ", "[a, ", "|\n "])
def test_a_hostile_file_is_refused_in_time(load, unit):
    content = "args: [" + unit * (200_000 // len(unit))
    begin = time.process_time()
    with pytest.raises(Exception, match=r"fasttrain\.yaml"):
        load(content)
    assert time.process_time() - begin < 5
