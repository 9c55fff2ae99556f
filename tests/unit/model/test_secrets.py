from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.model.crash import Crash, Frame
from fasttrain.model.secrets import (
    hide,
    is_secret_name,
    mask_args,
    mask_value,
    secret_values,
    without_secrets,
)

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD",
     "MyTokenFile", "SECRETS", "SLURM_JWT", "MYSQL_PASSWD", "SSH_PASSPHRASE"],
)  # fmt: skip
def test_names_that_tell_of_a_secret(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["PATH", "OMP_NUM_THREADS", "NCCL_DEBUG", "PASS", "TOK"])
def test_names_that_do_not(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "option",
    ["--api-key", "--api_key", "--key", "--hf_token", "--token", "-token", "--apikey", "--apiKey",
     "--hfToken", "--db-password", "--passwd", "--client.secret", "--API-KEY",
     "--passphrase", "--jwt"],
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
    assert {"of the database", "key-of-args", "hf_abcdef"} <= set(values)
    assert list(values) == sorted(values, key=len, reverse=True)
    assert hide("GET /hf_abcdef/key-of-args false", values) == "GET /***/*** false"


def test_of_two_secrets_the_longer_is_hidden_whole():
    values = secret_values({"A_KEY": "abcdef", "B_KEY": "abcdefgh"}, ())
    assert hide("abcdefgh abcdef", values) == "*** ***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://me:pw@db:5432/x", "postgres://me:***@db:5432/x"),
        ("see redis://:pw@h, http://a:b@c", "see redis://:***@h, http://***@c"),
        ("https://ghp_1:x-oauth-basic@github.com", "https://***@github.com"),
        ("https://sk_1:@api", "https://***@api"),
        ("redis://me:p:q@h", "redis://me:***@h"),
        ("redis://me:p'q@h", "redis://me:***@h"),
        ("https://ghp_1@github.com/x", "https://***@github.com/x"),
        ("mongodb+srv://u:p%40q@h", "mongodb+srv://u:***@h"),
    ],
)
def test_passwords_in_urls(text, shown):
    assert hide(text, ()) == shown
    assert mask_args(["--db", text, f"--db={text}"]) == ("--db", shown, f"--db={shown}")
    assert mask_value("DATABASE_URL", text) == shown


@pytest.mark.parametrize(
    "text",
    ["ssh://git@github.com/x", "s3://bucket/a:b@c", "http://host:8080/@me", "me@host", "a://b:c",
     "{'a': 'redis://h', 'b': 'me@host'}", "{'a':'redis://h','b':'me@host'}",
     "tcp://10.0.0.1:29400"],
)  # fmt: skip
def test_what_is_no_password(text):
    assert hide(text, ()) == text


def test_a_long_text_is_searched_in_time_by_its_length():
    text = "a." * 300_000  # by the square of it, over the time that a test has here
    assert hide(text, ()) == text


def test_a_password_is_known_by_its_place_in_a_url():
    environ = {"https_proxy": "http://me:proxy-pw@proxy", "PATH": "/usr/bin"}
    values = secret_values(environ, ("--db=postgres://me:data%2Fbase@h",))
    assert {"data%2Fbase", "data/base", "proxy-pw"} <= set(values)
    assert not {"/usr/bin", "me", "https_proxy"} & set(values)


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ("https://ghp_abcdef:x-oauth-basic@github.com", "ghp_abcdef"),
        ("https://sk_abcdef:@api.stripe.com", "sk_abcdef"),
        ("https://somebody:abc:def@host", "abc:def"),
    ],
)
def test_which_part_of_a_url_is_the_secret(url, known):
    assert known in secret_values({"REMOTE": url}, ())
    assert hide("by somebody, x-oauth-basic", secret_values({"REMOTE": url}, ())) == (
        "by somebody, x-oauth-basic"
    )


@pytest.mark.parametrize(
    ("secret", "told"),
    [
        ("abc/def+ghi==", "GET /?key=abc/def%2Bghi%3D%3D"),
        ("abc/def+ghi==", "GET /?key=abc%2Fdef%2Bghi%3D%3D"),
        ("pass word", "GET /?key=pass+word"),
        ('pa\\ss"wörd', "KeyError: 'pa\\\\ss\"wörd'"),
        ('pa\\ss"wörd', '{"password": "pa\\\\ss\\"w\\u00f6rd"}'),
    ],
)
def test_a_secret_in_other_words(secret, told):
    hidden = hide(told, secret_values({"DB_PASSWORD": secret}, ()))
    assert hidden.count("***") == 1
    assert hidden.strip("'\"{}").endswith("***")


def test_secrets_that_are_known_are_masked_wherever_they_stand():
    values = secret_values({"WANDB_API_KEY": "abcdef123"}, ())
    assert mask_args(["--wandb", "abcdef123", "-x=(abcdef123)"], values) == (
        "--wandb", "***", "-x=(***)",
    )  # fmt: skip
    assert mask_value("NOTE", "by abcdef123", values) == "by ***"
    assert mask_value("OTHER_TOKEN", "x") == "***"


def test_every_text_of_a_report_is_cleaned():
    crash = Crash(
        0, 1, 1, "", 5, "slug", "why abcdef123", "", error="https://x:y@z",
        frames=(Frame("a.py", 3, "f", 'login("abcdef123")'),), log=("abcdef123", "é"),
    )  # fmt: skip
    clean = without_secrets(Crash, crash, ("abcdef123",))
    assert (clean.why, clean.error, clean.log) == ("why ***", "https://***@z", ("***", "é"))
    assert clean.frames == (Frame("a.py", 3, "f", 'login("***")'),)
    assert replace(clean, why="", error="", frames=(), log=()) == replace(
        crash, why="", error="", frames=(), log=()
    )
