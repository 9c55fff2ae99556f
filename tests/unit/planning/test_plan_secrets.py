from __future__ import annotations

import re

import pytest

from fasttrain.model.codec import dumps
from fasttrain.model.plan import Target
from fasttrain.planning.explain import decisions, mask_plan, shell_script

SECRET = "s3cr3t"


@pytest.fixture(params=["direct", "torchrun", "command"])
def plan(make, request):
    args = ("--hf_token", SECRET, f"--api-key={SECRET}", "--tokenizer", "bert")
    kind = "command" if request.param == "command" else "script"
    options = {"nproc_per_node": 2} if request.param == "torchrun" else {}
    env = (f"HF_TOKEN={SECRET}", "TOKENS_PER_BATCH_=8", "PLAIN=1")
    environ = {"HF_TOKEN": f"{SECRET}-before", "MY_PASSWORD": SECRET}
    return make.plan(make.machine(), environ, Target(kind, "train.py", args), env=env, **options)


def test_a_masked_plan_holds_no_secret(plan):
    masked = mask_plan(plan)
    assert SECRET in dumps(plan)
    assert SECRET not in dumps(masked)
    assert masked.argv[-5:] == ("--hf_token", "***", "--api-key=***", "--tokenizer", "bert")
    assert masked.target.args == masked.argv[-5:]
    values = {variable.name: variable.value for variable in masked.environment}
    assert (values["HF_TOKEN"], values["PLAIN"]) == ("***", "1")
    assert mask_plan(masked) == masked
    assert plan.argv[:-5] == masked.argv[:-5]


def test_no_view_of_a_plan_shows_a_secret(plan):
    environ = {"HF_TOKEN": f"{SECRET}-before", "MY_PASSWORD": SECRET}
    assert SECRET not in shell_script(plan, environ)
    assert SECRET not in repr(decisions(plan))


def test_a_secret_of_the_environment_that_is_typed_as_an_argument(make):
    args = ("--wandb", SECRET, f"--db=pg://me:{SECRET}@h/x", f"--note=by {SECRET}")
    environ = {"WANDB_API_KEY": SECRET}
    plan = make.plan(make.machine(), environ, Target("script", f"{SECRET}.py", args))
    shown = ("--wandb", "***", "--db=pg://me:***@h/x", "--note=by ***")
    masked = mask_plan(plan, environ)
    assert masked.target.args == masked.argv[-4:] == shown
    assert masked.argv[:-4] == plan.argv[:-4], "what starts the script is no text"
    *_, command = [line for line in shell_script(plan, environ).splitlines() if "exec" in line]
    ask = r'"\$\{SECRET_%d:\?[^"}]*\bSECRET_%d\b[^"}]*\}"'
    first = len(plan.argv) - 3
    asked = [ask % (number, number) for number in range(first, first + 3)]
    expected = f" --wandb {asked[0]} {asked[1]} '--note=by '{asked[2]}$"
    assert re.search(expected, command)


def test_a_password_in_a_variable_is_asked_for(make):
    url = "pg://me:pass-word@h"
    plan = make.plan(make.machine(), {}, env=(f"DB={url}",))
    assert mask_plan(plan).environment[-1].value == "pg://me:***@h"
    text = shell_script(plan, {"DB": "http://u:other-word@h"})
    assert "pass-word" not in text
    assert "other-word" not in text
    assert "export DB\n" in text


def test_a_variable_that_is_unset_stays_so(make):
    from dataclasses import replace

    plan = make.plan(make.machine(), env=("MY_KEY=1",))
    unset = replace(plan, environment=(replace(plan.environment[-1], value=None),))
    assert mask_plan(unset).environment[0].value is None
