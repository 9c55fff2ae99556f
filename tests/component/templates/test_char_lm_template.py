"""The language model sees only the past, and is taught the character that comes next."""

import importlib.util
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

PATH = Path(__file__).parents[3] / "templates/language_model/char_lm.py"


@pytest.fixture(scope="module")
def char_lm() -> ModuleType:
    spec = importlib.util.spec_from_file_location("char_lm", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_later_character_does_not_change_earlier_logits(char_lm: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    model = char_lm.CharTransformer(block=8, width=16, layers=2, heads=2).eval()
    first = torch.randint(128, (1, 8), generator=generator)
    second = first.clone()
    second[0, 5] = (second[0, 5] + 1) % 128
    with torch.no_grad():
        before, after = model(first), model(second)
    assert before.shape == (1, 8, 128)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_targets_are_the_inputs_one_character_later(char_lm: ModuleType) -> None:
    inputs, targets = char_lm.windows(torch.arange(10), torch.tensor([0, 6]), 3)
    assert inputs.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert targets.tolist() == [[1, 2, 3], [7, 8, 9]]


def test_the_learning_rate_peaks_after_the_warm_up_and_ends_at_a_tenth(char_lm: ModuleType) -> None:
    args = Namespace(lr=1.0, weight_decay=0.1)
    optimizer = char_lm.make_optimizer(torch.nn.Linear(2, 2), args)
    scheduler = char_lm.make_scheduler(optimizer, steps=20, warmup=5)
    rates = []
    for _ in range(21):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates.index(max(rates)) == 4
    assert rates[4] == pytest.approx(1.0)
    assert rates[20] == pytest.approx(0.1)


def test_only_matrices_decay(char_lm: ModuleType) -> None:
    layer = torch.nn.Linear(2, 2)
    groups = char_lm.make_optimizer(layer, Namespace(lr=1.0, weight_decay=0.1)).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decay == {id(layer.weight): 0.1, id(layer.bias): 0.0}


def test_the_corpus_is_ascii_and_as_long_as_asked(char_lm: ModuleType) -> None:
    codes = char_lm.read_corpus(20_000)
    assert codes.shape == (20_000,)
    assert codes.max() < 128
