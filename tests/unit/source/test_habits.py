"""What is read from scripts of the wild; the expectations were counted in their text."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fasttrain.model.codec import from_data, to_data
from fasttrain.model.plan import Target
from fasttrain.source import local_modules, read
from fasttrain.source.habits import Habit, Habits
from fasttrain.source.local_modules import parse
from fasttrain.source.read import read_program

SCRIPTS = Path(__file__).parents[2] / "scripts"
Found = Callable[..., set[tuple[Habit, str, int]]]


def of_script(name: str) -> Habits:
    return read_program(Target("script", name), str(SCRIPTS), {})[1]


def places(habits: Habits) -> set[tuple[Habit, str, int]]:
    return {
        (habit, e.what, int(e.where.rpartition(":")[2]))
        for habit, evidence in habits.found.items()
        for e in evidence
    }


@pytest.fixture
def habits_of(tmp_path: Path, lay: Callable[[Mapping[str, str]], None]) -> Callable[..., Habits]:
    def run(files: Mapping[str, str] | str) -> Habits:
        lay({"train.py": files} if isinstance(files, str) else files)
        before = set(sys.modules)
        _, habits = read_program(Target("script", "train.py"), str(tmp_path), {}, lambda _: None)
        new = {name for name in set(sys.modules) - before if not name.startswith("encodings.")}
        assert new == set(), "a module was imported"
        return habits

    return run


WILD = {
    "accumulate_odd.py": {(Habit.OPTIMIZER, "AdamW", 14), (Habit.SYNC, ".item()", 25)},
    # .item() stands under `if chunk % 5 == 0`
    "char_lstm.py": {(Habit.RECURRENT, "LSTM", 17), (Habit.OPTIMIZER, "Adagrad", 28)},
    # the step is a function of its own, and reads the loss only every so many steps
    "convnet_batchnorm.py": {(Habit.OPTIMIZER, "SGD", 72)},
    "distillation_ema.py": {(Habit.OPTIMIZER, "SGD", 42)},
    "gpt_cosine.py": {(Habit.OPTIMIZER, "AdamW", 81)},
    # its loop reads the loss, but backward() is called elsewhere
    "lbfgs_closure.py": {(Habit.OPTIMIZER, "LBFGS", 9)},
    "loader_workers.py": {
        *((Habit.LOADER, "DataLoader", line) for line in (36, 37)),
        *((Habit.NO_PINNING, "DataLoader", line) for line in (36, 37)),
        (Habit.OPTIMIZER, "NAdam", 39),
    },
    "maml_functional.py": {
        (Habit.OPTIMIZER, "Adam", 8),
        (Habit.SECOND_DERIVATIVES, "create_graph=True", 28),
    },
    "manual_sgd.py": {(Habit.SYNC, ".item()", 40)},
    "own_amp.py": {
        (Habit.OPTIMIZER, "Adam", 8),
        (Habit.SCALER, "GradScaler", 9),
        (Habit.AUTOCAST, "autocast", 17),
    },
    "own_compile.py": {(Habit.COMPILE, "raw_model", 7), (Habit.OPTIMIZER, "SGD", 8)},
    "packed_lengths.py": {
        (Habit.RECURRENT, "GRU", 19),
        (Habit.OPTIMIZER, "Adam", 32),
        (Habit.SYNC, ".item()", 41),
    },
    "retain_graph.py": {
        (Habit.OPTIMIZER, "SGD", 20),
        (Habit.RETAINED_GRAPH, "retain_graph=True", 32),
        (Habit.SYNC, ".item()", 33),
    },
    "scripted_part.py": {(Habit.TORCHSCRIPT, "script", 26), (Habit.OPTIMIZER, "Adam", 35)},
    "sparse_embeddings.py": {
        *((Habit.SPARSE, "Embedding(sparse=True)", line) for line in (12, 13)),
        (Habit.OPTIMIZER, "SparseAdam", 24),
        (Habit.OPTIMIZER, "Adam", 24),
    },
    # a TensorDataset lies in memory: no workers are missed
    "swa_update_bn.py": {(Habit.LOADER, "DataLoader", 11), (Habit.OPTIMIZER, "SGD", 15)},
    "wgan_gp.py": {
        (Habit.SECOND_DERIVATIVES, "create_graph=True", 19),
        (Habit.OPTIMIZER, "Adam", 27),
        (Habit.OPTIMIZER, "Adam", 28),
        (Habit.SYNC, "print of loss_g", 46),
    },
    # a stream, of which each worker would make all samples; "cuda" stands under a condition
    "loaders/stream_dataset.py": {
        (Habit.OPTIMIZER, "SGD", 33),
        *((Habit.LOADER, "DataLoader", line) for line in (36, 45)),
        (Habit.SYNC, "float(loss)", 38),
    },
    # the second loader reads images in the training process
    "loaders/workers_drop_last.py": {
        *((Habit.LOADER, "DataLoader", line) for line in (95, 99)),
        (Habit.PERSISTENT, "DataLoader", 95),
        (Habit.NO_WORKERS, "DataLoader", 99),
        (Habit.OPTIMIZER, "SGD", 101),
        (Habit.SYNC, ".item()", 68),
    },
}


@pytest.mark.parametrize("name", WILD)
def test_scripts_of_the_wild(name):
    habits = of_script(name)
    assert places(habits) == WILD[name]
    assert habits.open == ()


NAMED = {
    "from torch.cuda.amp import autocast\nwith autocast(): 0": (Habit.AUTOCAST, "autocast"),
    "import torch\nwith torch.amp.autocast('cuda'): 0": (Habit.AUTOCAST, "autocast"),
    "from torch.cuda import amp\ns = amp.GradScaler()": (Habit.SCALER, "GradScaler"),
    "import torch as t\nt.autograd.set_detect_anomaly(True)": (
        Habit.ANOMALY,
        "set_detect_anomaly",
    ),
    "import torch\nwith torch.autograd.detect_anomaly(): 0": (Habit.ANOMALY, "detect_anomaly"),
    "import torch\ntorch.use_deterministic_algorithms(True)": (
        Habit.DETERMINISTIC,
        "use_deterministic_algorithms",
    ),
    "import torch.backends.cudnn as cudnn\ncudnn.deterministic = True": (
        Habit.CUDNN,
        "cudnn.deterministic = True",
    ),
    "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True": (
        Habit.MATMUL,
        "torch.backends.cuda.matmul.allow_tf32 = True",
    ),
    "import torch\ntorch.set_float32_matmul_precision('high')": (
        Habit.MATMUL,
        "set_float32_matmul_precision",
    ),
    "from torch import nn\nm = nn.DataParallel(m)": (Habit.DATA_PARALLEL, "DataParallel"),
    "from torch import nn\nm = nn.SyncBatchNorm.convert_sync_batchnorm(m)": (
        Habit.SYNC_BN,
        "SyncBatchNorm",
    ),
    "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'": (
        Habit.VISIBLE,
        "CUDA_VISIBLE_DEVICES = '1'",
    ),
    "x = x.cuda()": (Habit.DEVICE, ".cuda()"),
    "x = x.cuda(1)": (Habit.DEVICE, "cuda:1"),
    "import torch\nd = torch.device('cuda:2')": (Habit.DEVICE, "cuda:2"),
    "import torch\nx = torch.zeros(3, device='cuda')": (Habit.DEVICE, "cuda"),
    "import torch\ntorch.set_default_dtype(torch.float64)": (Habit.DTYPE, "float64"),
    "m = Net().double()\nm.parameters()": (Habit.DTYPE, "float64"),
    "import torch\nm = Net()\nm.to(torch.bfloat16)\nm.parameters()": (Habit.DTYPE, "bfloat16"),
    "m.compile()\nm.parameters()": (Habit.COMPILE, "m"),
    "import torch\nclass N:\n  @torch.compile\n  def forward(self): 0": (Habit.COMPILE, "forward"),
    "import lightning as L\nL.Trainer()": (Habit.FRAMEWORK, "lightning.Trainer"),
    "from lightning.pytorch import Trainer\nTrainer(precision='16-mixed')": (
        Habit.PRECISION,
        "precision='16-mixed'",
    ),
    "from accelerate import Accelerator\nAccelerator(mixed_precision='bf16')": (
        Habit.PRECISION,
        "mixed_precision='bf16'",
    ),
    "from transformers import Trainer\nclass T(Trainer): 0\nT(m)": (
        Habit.FRAMEWORK,
        "transformers.Trainer",
    ),
    "from transformers import TrainingArguments as A\nA(fp16=True)": (
        Habit.PRECISION,
        "fp16=True",
    ),
    "from mmengine.runner import Runner\nRunner.from_cfg(c)": (
        Habit.FRAMEWORK,
        "mmengine.Runner",
    ),
    "import deepspeed\ndeepspeed.initialize(model=m)": (
        Habit.FRAMEWORK,
        "deepspeed.initialize",
    ),
    "from ignite.engine import Engine\nEngine(step)": (Habit.FRAMEWORK, "ignite.Engine"),
    "import torch\ntorch.optim.Adam(p, fused=True)": (Habit.IMPLEMENTATION, "fused=True"),
    "import torch\ntorch.optim.Adam(p, foreach=False)": (Habit.IMPLEMENTATION, "foreach=False"),
    "from torch.optim import Optimizer\nclass Lion(Optimizer): 0\nLion(p)": (
        Habit.OPTIMIZER,
        "Lion(Optimizer)",
    ),
    "import torch\nclass Adam(torch.optim.Adam): 0\nAdam(p)": (Habit.OPTIMIZER, "Adam(Adam)"),
}


@pytest.mark.parametrize(("source", "sign"), NAMED.items())
def test_a_habit_that_is_sure(habits_of, source, sign):
    habits = habits_of(source)
    assert sign in {(habit, what) for habit, what, _ in places(habits)}
    assert habits.sure(sign[0]) is not None


OPEN = {
    "import torch\nwith torch.autocast('cuda', enabled=args.amp): 0": Habit.AUTOCAST,
    "from torch.cuda.amp import autocast\nwith autocast(args.amp): 0": Habit.AUTOCAST,
    "import torch\nif args.amp:\n  s = torch.amp.GradScaler()": Habit.SCALER,
    "import torch\nc = n() if cpu else torch.autocast('cuda')": Habit.AUTOCAST,
    "import torch\nif args.compile:\n  m = torch.compile(m)\nm.parameters()": Habit.COMPILE,
    "import torch\nf = torch.compile(step)": Habit.COMPILE,  # a function, perhaps
    "import torch\nif torch.cuda.is_available():\n  m.cuda()": Habit.DEVICE,
    "def put(x):\n  if cpu:\n    return x\n  return x.cuda()": Habit.DEVICE,
    "ok and m.cuda()": Habit.DEVICE,
    "import torch\ntorch.optim.AdamW(p, **extra)": Habit.IMPLEMENTATION,
    "import torch\ntorch.optim.AdamW(p, fused=args.fused)": Habit.IMPLEMENTATION,
    "from lightning import Trainer\nTrainer(precision=args.p)": Habit.PRECISION,
}


@pytest.mark.parametrize(("source", "habit"), OPEN.items())
def test_a_condition_leaves_it_open(habits_of, source, habit):
    habits = habits_of(source)
    assert habits.any(habit) is not None
    assert habits.sure(habit) is None


NOTHING = [
    "import torch\nwith torch.autocast('cuda', enabled=False): 0",
    "from torch.cuda.amp import autocast\nwith autocast(False): 0",
    "import torch\ntorch.autograd.set_detect_anomaly(False)",
    "import torch\nif False:\n  torch.autograd.set_detect_anomaly(True)",
    "import re\nmodel = re.compile('x')\nmodel.match('x')",
    "from mine import autocast, Trainer, DataLoader\nautocast()\nTrainer()\nDataLoader(d)",
    "import torch\nisinstance(m, torch.nn.LSTM)\nisinstance(m, torch.nn.DataParallel)",
    "import torch\nn = torch.nn.LSTMCell(2, 2)",
    "from lightning import seed_everything\nseed_everything(1)",
    "import torch\nx = torch.zeros(3).double()",  # data, not a model
    "import torch\ntorch.save({'a': 1}, 'x.pt')",
    "import copy\nc = copy.deepcopy(config)",
    "import torch\ntorch.autograd.grad(y, x, create_graph=second)",
    "import torch\ns = torch.optim.lr_scheduler.StepLR(o, 1)",
    "parser.add_argument('--device', default='cuda')\nx = x.to('cpu')",
    "import torch\nscale = torch.nn.Embedding(3, 4, sparse=False)",
]


@pytest.mark.parametrize("source", NOTHING)
def test_what_is_no_habit(habits_of, source):
    assert places(habits_of(source)) == set()


LOOP = "for x in data:\n  loss = m(x)\n  loss.backward()\n"
SYNCS = {
    LOOP + "  total += loss.item()": [".item()"],
    LOOP + "  logits.append(y.detach().cpu().numpy())": [".cpu()"],
    LOOP + "  print(f'{i}: {loss:.3f}')": ["print of loss"],
    LOOP + "  print('loss', loss)": ["print of loss"],
    LOOP + "  print(i)\n  y.numpy()": [],
    LOOP + "  if i % 10 == 0:\n    print(loss.item())": [],
    LOOP + "  a = loss.item() if log else None": [],
    LOOP + "  for m in metrics:\n    m.item()": [],
    "for epoch in e:\n  " + LOOP.replace("\n", "\n  ") + "\n  print(loss.item())": [],
    "for x in val:\n  total += m(x).item()": [],
    "def step(x):\n  loss.backward()\n  return loss.item()": [".item()"],
    "loss.backward()\nprint(loss.item())": [],  # not in a loop
    "for x in d:\n  scaler.scale(loss).backward()\n  print(float(loss))": ["float(loss)"],
    "for x in d:\n  self.loss.backward()\n  print(self.loss)": ["print of self.loss"],
    "for x in d:\n  accelerator.backward(loss)\n  print(loss)": ["print of loss"],
}


@pytest.mark.parametrize(("source", "waits"), SYNCS.items())
def test_what_waits_in_each_step(habits_of, source, waits):
    assert [evidence.what for evidence in habits_of(source).of(Habit.SYNC)] == waits


DATA = "from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset\n"
MINE = DATA + "class D(Dataset): 0\n"
LOADERS = {
    MINE + "DataLoader(D(), 8)": {Habit.NO_WORKERS},
    MINE + "d = D()\nDataLoader(d, num_workers=0)": {Habit.NO_WORKERS},
    MINE + "DataLoader(D(), num_workers=2)": {Habit.NO_PINNING},
    MINE + "DataLoader(D(), 8, True, None, None, 2)": {Habit.NO_PINNING},
    MINE + "DataLoader(D(), num_workers=2, pin_memory=True)": set(),
    MINE + "DataLoader(D(), 8, True, None, None, 2, None, True)": set(),
    MINE + "DataLoader(D(), num_workers=2, pin_memory=cuda, persistent_workers=True)": {
        Habit.PERSISTENT
    },
    MINE + "DataLoader(D(), **options)": set(),
    MINE + "class L(DataLoader): 0\nL(D())": set(),
    DATA + "DataLoader(TensorDataset(x))": set(),
    DATA + "d = TensorDataset(x)\nDataLoader(d)": set(),
    DATA + "def make(): return TensorDataset(x)\nDataLoader(make())": set(),
    DATA + "class S(IterableDataset): 0\nDataLoader(S())": set(),
    "from torch.utils.data import DataLoader\nimport torchvision\n"
    "DataLoader(torchvision.datasets.CIFAR10('x'))": {Habit.NO_WORKERS},
}


@pytest.mark.parametrize(("source", "expected"), LOADERS.items())
def test_how_loaders_read(habits_of, source, expected):
    found = set(habits_of(source).found) - {Habit.OPTIMIZER}
    assert found == expected | {Habit.LOADER}


def test_names_lead_through_the_users_own_modules(habits_of):
    habits = habits_of(
        {
            "train.py": "from helpers import *\nfrom base import Mine\nMine()\nwith autocast(): 0",
            "helpers.py": "from torch.cuda.amp import autocast",
            "base.py": "import lightning as L\nclass Mine(L.Trainer): 0",
        }
    )
    assert places(habits) == {
        (Habit.AUTOCAST, "autocast", 4),
        (Habit.FRAMEWORK, "lightning.Trainer", 3),
    }


def test_a_module_of_the_users_own_hides_a_package_of_its_name(habits_of):
    files = {"train.py": "import accelerate\naccelerate.Accelerator()", "accelerate.py": ""}
    assert habits_of(files) == Habits()


@pytest.mark.parametrize(
    ("source", "habit"),
    [
        ("from lightning import Trainer\nTrainer(precision='32-true')", Habit.FRAMEWORK),
        ("import torch\ns = torch.amp.GradScaler(device='cuda')", Habit.SCALER),
    ],
)
def test_a_keyword_that_says_nothing_more(habits_of, source, habit):
    assert list(habits_of(source).found) == [habit]


def test_an_imported_module_is_not_run_as_main(habits_of):
    files = {"train.py": "import net", "net.py": "if __name__ == '__main__':\n  x.cuda()"}
    assert habits_of(files) == Habits()
    assert places(habits_of(files["net.py"])) == {(Habit.DEVICE, ".cuda()", 2)}


def test_an_imported_module_is_told_by_its_own_path(habits_of):
    habits = habits_of({"train.py": "import net", "net.py": "import torch\nx.cuda()"})
    assert [e.where for e in habits.of(Habit.DEVICE)] == ["net.py:2"]


def test_modules_that_derive_from_each_other_end(habits_of):
    files = {
        "train.py": "from a import A\nA()",
        "a.py": "from b import B\nclass A(B): 0",
        "b.py": "from a import A\nclass B(A): 0",
    }
    assert habits_of(files) == Habits()


def test_what_cannot_be_read_has_no_habits(habits_of, tmp_path):
    assert habits_of("def broken(:") == Habits()
    assert read_program(Target("script", "gone.py"), str(tmp_path), {})[1] == Habits()
    assert read_program(Target("command", "./train.sh"), str(tmp_path), {})[1] == Habits()


@pytest.mark.parametrize(("kept", "times"), [(1_000_000, 1), (0, 2)])
def test_a_file_is_parsed_once_unless_its_tree_was_let_go(habits_of, monkeypatch, kept, times):
    parsed: list[str] = []

    def counted(path: Path) -> ast.Module:
        parsed.append(path.name)
        return parse(path)

    monkeypatch.setattr(local_modules, "parse", counted)
    monkeypatch.setattr(read, "KEPT_BYTES", kept)
    files = {"train.py": "import helper\nif __name__ == '__main__':\n  helper.model.cuda()"}
    found = habits_of({**files, "helper.py": "import torch\ntorch.autocast('cuda')"})
    assert sorted(parsed) == ["helper.py"] * times + ["train.py"] * times
    assert places(found) == {(Habit.DEVICE, ".cuda()", 3), (Habit.AUTOCAST, "autocast", 2)}


def test_habits_survive_json(habits_of):
    habits = habits_of("import torch\nif a:\n  torch.autocast('cuda')\nx.cuda()")
    assert len(habits.found) == 2
    assert from_data(Habits, to_data(habits)) == habits
