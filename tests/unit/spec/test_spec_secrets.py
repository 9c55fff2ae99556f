from __future__ import annotations

import pytest

from fasttrain.spec.secrets import hide, is_secret_name, mask_args, secret_values

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD",
     "MyTokenFile", "SECRETS", "SLURM_JWT"],
)  # fmt: skip
def test_names_that_tell_of_a_secret(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["PATH", "OMP_NUM_THREADS", "NCCL_DEBUG", "PASS", "TOK"])
def test_names_that_do_not(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "option",
    ["--api-key", "--api_key", "--key", "--hf_token", "--token", "-token", "--apikey", "--apiKey",
     "--hfToken", "--db-password", "--passwd", "--client.secret", "--API-KEY"],
)  # fmt: skip
def test_secret_options_in_both_forms(option):
    assert mask_args(["a", option, SECRET, "b"]) == ("a", option, "***", "b")
    assert mask_args([f"{option}={SECRET}", "b"]) == (f"{option}=***", "b")


def test_secrets_in_the_words_of_other_argument_styles():
    assert mask_args([f"wandb.api_key={SECRET}"]) == ("wandb.api_key=***",)
    assert mask_args([f"HF_TOKEN={SECRET}", "python"]) == ("HF_TOKEN=***", "python")
    assert mask_args(["--token", f"-{SECRET}"]) == ("--token", "***")


@pytest.mark.parametrize(
    "args",
    [("--tokenizer", "bert"), ("--key-dim", "64"), ("--num-tokens", "9"), ("--tokenizer=bert",),
     ("--keys", "a"), ("--monkey", "b"), ("key", "value"), ("train.py", "--lr", "3"),
     ("--use-token", "--lr", "3"), ("--token",), ("x=key", "y")],
)  # fmt: skip
def test_other_arguments_stay(args):
    assert mask_args(args) == args


def test_values_to_hide_wherever_they_turn_up():
    environ = {"HF_TOKEN": "hf_abcdef", "PATH": "/usr/bin", "TOKENIZERS_PARALLELISM": "false"}
    args = ("--lr", "3", "--api-key", "key-of-args", "db_password=of the database")
    values = secret_values(environ, args)
    assert values == ("of the database", "key-of-args", "hf_abcdef")
    assert hide("GET /hf_abcdef/key-of-args false", values) == "GET /***/*** false"


def test_of_two_secrets_the_longer_is_hidden_whole():
    values = secret_values({"A_KEY": "abcdef", "B_KEY": "abcdefgh"}, ())
    assert hide("abcdefgh abcdef", values) == "*** ***"
