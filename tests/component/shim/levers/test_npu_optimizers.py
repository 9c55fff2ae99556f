"""What torch_npu's fused optimizers may stand in for; on a CPU, by classes of the same names."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer, RMSprop

from fasttrain.model.outcome import State
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.npu_optimizer.counterparts import (
    COUNTERPARTS,
    NONE_FUSED,
    NOT_CONTIGUOUS,
    PART,
    SHARED,
    _tensor_reasons,
    counterpart_of,
    on_device,
    why_not,
    why_not_now,
)
from fasttrain.shim.levers.npu_optimizer.lever import NpuOptimizerLever

# What torch_npu's constructors take. Source: torch_npu/optim/*.py, torch_npu 2.13.0
ADAM = ("lr", "betas", "eps", "weight_decay")
SIGNATURES = {
    "NpuFusedSGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "NpuFusedAdam": (*ADAM, "amsgrad"),
    "NpuFusedAdamW": (*ADAM, "amsgrad"),
    "NpuFusedAdadelta": ("lr", "rho", "eps", "weight_decay"),
    "NpuFusedRMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
    "NpuFusedRMSpropTF": (
        "lr", "alpha", "eps", "weight_decay", "momentum", "centered", "decoupled_decay",
        "lr_in_momentum",
    ),
    "NpuFusedAdamP": (*ADAM, "delta", "wd_ratio", "nesterov"),
    "NpuFusedLamb": (*ADAM, "adam", "use_global_grad_norm"),
    "NpuFusedBertAdam": (
        "lr", "warmup", "t_total", "schedule", "b1", "b2", "e", "weight_decay", "max_grad_norm",
    ),
}  # fmt: skip
TORCHS_OWN = (SGD, Adam, AdamW, Adadelta, RMSprop)
# All else fits: only the device is not the one.
FITS = on_device("cpu")


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.ones(shape or (3,), dtype=dtype))
    made.grad = torch.ones_like(made)
    return made


def stand_in(path: str, attributes: dict[str, Any] | None = None, **settings: Any) -> Optimizer:
    """Return an optimizer of a package that is not installed, with the settings of its group."""
    module, _, name = path.rpartition(".")
    kind = type(name, (Optimizer,), {"step": lambda self: None, "__module__": module})
    made: Any = kind([parameter()], settings)
    vars(made).update(attributes or {})
    return made


ADAMP = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "delta": 0.1,
         "wd_ratio": 0.1, "nesterov": False}  # fmt: skip
RMSPROP_TF = {"lr": 0.1, "alpha": 0.9, "eps": 1e-10, "weight_decay": 0, "momentum": 0.9,
              "centered": False, "lr_in_momentum": True, "decoupled_decay": False,
              "corrected_weight_decay": False, "max_lr_snapshot": None, "caution": False,
              "foreach": None}  # fmt: skip
LAMB = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0}
BERT = {"lr": 0.1, "schedule": None, "b1": 0.9, "b2": 0.999, "e": 1e-6, "weight_decay": 0.01}


@pytest.mark.parametrize("path", COUNTERPARTS)
def test_a_counterpart_takes_what_it_is_given(path: str) -> None:
    counterpart = COUNTERPARTS[path]
    given = {*counterpart.arguments, *counterpart.constants}
    assert given <= set(SIGNATURES[counterpart.fused])


def test_all_nine_are_in_the_table() -> None:
    assert {counterpart.fused for counterpart in COUNTERPARTS.values()} == set(SIGNATURES)


@pytest.mark.parametrize("kind", TORCHS_OWN)
def test_torchs_own_with_their_defaults_fit(kind: Any) -> None:
    assert why_not(kind([parameter()], lr=0.1)) == FITS


@pytest.mark.parametrize("kind", TORCHS_OWN)
@pytest.mark.parametrize("setting", ["maximize", "foreach", "differentiable"])
def test_what_torch_npu_has_none_of_is_refused_by_name(kind: Any, setting: str) -> None:
    reason = why_not(kind([parameter()], lr=0.1, **{setting: True}))
    assert f"{setting}=True" in reason


def test_a_setting_of_one_group_counts() -> None:
    groups = [{"params": [parameter()]}, {"params": [parameter()], "maximize": True}]
    assert "maximize=True" in why_not(Adam(groups))


def test_adam_with_decoupled_decay_is_another_optimizer() -> None:
    assert "decoupled_weight_decay" in why_not(Adam([parameter()], decoupled_weight_decay=True))


def test_a_rate_that_is_a_tensor_is_refused() -> None:
    assert re.search(r"\blr\b.*\btensor\b", why_not(Adam([parameter()], lr=torch.tensor(0.1))))


def test_what_a_script_sets_later_is_seen() -> None:
    optimizer = SGD([parameter()], lr=0.1)
    assert why_not_now(optimizer) == ""
    optimizer.param_groups[0]["maximize"] = True
    assert "maximize=True" in why_not_now(optimizer)


def test_an_argument_of_a_later_torch_is_not_dropped_silently() -> None:
    optimizer = SGD([parameter()], lr=0.1)
    optimizer.defaults["cautious"] = True
    assert "cautious" in why_not(optimizer)


def test_a_subclass_may_compute_anything() -> None:
    assert counterpart_of(type("SGD", (SGD,), {})) is None
    assert why_not(type("Mine", (SGD,), {})([parameter()], lr=0.1)) == NONE_FUSED


OTHERS = [
    ("adamp.adamp.AdamP", ADAMP, {}, FITS),
    ("torch_optimizer.adamp.AdamP", ADAMP, {}, FITS),
    ("timm.optim.adamp.AdamP", {**ADAMP, "caution": False}, {}, FITS),
    ("timm.optim.adamp.AdamP", {**ADAMP, "caution": True}, {}, "caution=True"),
    ("timm.optim.rmsprop_tf.RMSpropTF", RMSPROP_TF, {}, FITS),
    (
        "timm.optim.rmsprop_tf.RMSpropTF",
        {**RMSPROP_TF, "decoupled_decay": True},
        {},
        "decoupled_decay",
    ),
    ("timm.optim.rmsprop_tf.RMSpropTF", {**RMSPROP_TF, "foreach": True}, {}, "foreach=True"),
    ("torch_optimizer.lamb.Lamb", LAMB, {"clamp_value": 10, "adam": False, "debias": False}, FITS),
    ("torch_optimizer.lamb.Lamb", LAMB, {"clamp_value": 5}, "clamp_value=5"),
    ("torch_optimizer.lamb.Lamb", LAMB, {"debias": True}, "debias=True"),
    ("timm.optim.lamb.Lamb", LAMB, {}, " 10 "),
    ("pytorch_pretrained_bert.optimization.BertAdam", {**BERT, "max_grad_norm": -1}, {}, FITS),
    (
        "pytorch_pretrained_bert.optimization.BertAdam",
        {**BERT, "max_grad_norm": 1.0},
        {},
        "max_grad_norm=1.0",
    ),
]


@pytest.mark.parametrize(("path", "settings", "attributes", "reason"), OTHERS)
def test_optimizers_of_other_packages(
    path: str, settings: dict[str, Any], attributes: dict[str, Any], reason: str
) -> None:
    assert reason in why_not(stand_in(path, attributes, **settings))


def test_a_loaded_checkpoint_changes_nothing() -> None:
    optimizer = stand_in("adamp.adamp.AdamP", **ADAMP)
    optimizer.load_state_dict(optimizer.state_dict())
    assert why_not(optimizer) == FITS


def sparse() -> nn.Parameter:
    made = parameter(2, 2)
    made.grad = torch.ones(2, 2).to_sparse()
    return made


class Special(nn.Parameter):
    pass


def special() -> nn.Parameter:
    made = Special(torch.ones(2))
    made.grad = torch.ones(2)
    return made


def part_of_a_whole() -> nn.Parameter:
    made = nn.Parameter(torch.ones(10)[:4])
    made.grad = torch.ones(4)
    return made


def transposed() -> nn.Parameter:
    made = nn.Parameter(torch.ones(2, 3).t())
    made.grad = torch.ones(3, 2)
    return made


UNFIT = [
    (lambda: parameter(dtype=torch.bfloat16), "bfloat16"),
    (lambda: parameter(dtype=torch.float64), "float64"),
    (sparse, "sparse"),
    (special, "Special"),
    (part_of_a_whole, PART),
    (transposed, NOT_CONTIGUOUS),
]


@pytest.mark.parametrize(("make", "reason"), UNFIT)
def test_parameters_that_can_not_move_into_a_flat_buffer(make: Any, reason: str) -> None:
    assert reason in why_not(SGD([make()], lr=0.1))


def test_two_parameters_of_one_memory() -> None:
    # Only the memory of the CPU can be looked at here, and there the device comes first.
    first, storages = parameter(), set[int]()
    second = nn.Parameter(first.detach())
    second.grad = torch.ones(3)
    assert list(_tensor_reasons(first, storages)) == [FITS]
    assert list(_tensor_reasons(second, storages)) == [SHARED, FITS]


def test_parameters_without_a_gradient_stay_where_they_are() -> None:
    frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert why_not(SGD([frozen, parameter()], lr=0.1)) == FITS


@pytest.fixture
def lever() -> Iterator[NpuOptimizerLever]:
    with ExitStack() as undo:
        made = NpuOptimizerLever(OutcomeRecorder("optimizer", "npu", explicit=True))
        made.install(undo)
        yield made


def weights(steps: int = 3) -> torch.Tensor:
    p = parameter()
    optimizer = Adam([p], lr=0.1)
    for _ in range(steps):
        optimizer.step()
    return p.detach()


def test_off_an_npu_the_script_keeps_its_own_steps() -> None:
    expected = weights()
    with ExitStack() as undo:
        lever = NpuOptimizerLever(OutcomeRecorder("optimizer", "npu", explicit=True))
        lever.install(undo)
        assert torch.equal(weights(), expected)
    assert lever.recorder.outcome().state is State.SKIPPED
    assert lever.recorder.outcome().reason.endswith(FITS)


def test_a_step_with_a_closure_calls_it_once_and_gives_its_loss(lever: NpuOptimizerLever) -> None:
    p, calls = parameter(), []
    optimizer = Adam([p], lr=0.1)
    for _ in range(2):  # before and after it was given up
        assert optimizer.step(lambda: calls.append(torch.is_grad_enabled()) or 7.0) == 7.0
    assert calls == [True, True]


def test_only_what_may_be_swapped_is_taken(lever: NpuOptimizerLever) -> None:
    adam, adagrad = Adam([parameter()]), torch.optim.Adagrad([parameter()])
    assert lever.takes(adam)
    assert not lever.takes(adagrad)
    adam.step()
    assert not lever.takes(adam)  # given up: it is on a CPU


def test_copies_and_pickles_step_too(lever: NpuOptimizerLever) -> None:
    optimizer = AdamW([parameter()], lr=0.1)
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (p,) = made.param_groups[0]["params"]
        p.grad = torch.ones(3)
        made.step()
        assert bool((p < 1).all())


def test_a_subclass_reaches_torchs_own_step(lever: NpuOptimizerLever) -> None:
    class Mine(AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    p = parameter()
    Mine([p]).step()
    assert bool((p < 1).all())
    assert lever.recorder.outcome().state is State.ARMED


def test_torchs_classes_are_put_back() -> None:
    before = [vars(kind).get("step") for kind in TORCHS_OWN]
    construct = Optimizer.__init__
    with ExitStack() as undo:
        NpuOptimizerLever(OutcomeRecorder("optimizer", "npu", explicit=True)).install(undo)
        assert [vars(kind).get("step") for kind in TORCHS_OWN] != before
    assert [vars(kind).get("step") for kind in TORCHS_OWN] == before
    assert Optimizer.__init__ is construct


def test_a_step_that_was_inherited_is_inherited_again() -> None:
    base = type("Base", (Optimizer,), {"step": lambda self: None})
    base([parameter()], {})  # torch wraps the step of a class when the first one is made
    kind = type("AdamP", (base,), {"__module__": "adamp.adamp"})
    with ExitStack() as undo:
        NpuOptimizerLever(OutcomeRecorder("optimizer", "npu", explicit=True)).install(undo)
        kind([parameter()], ADAMP)
        assert "step" in vars(kind)
    assert "step" not in vars(kind)
