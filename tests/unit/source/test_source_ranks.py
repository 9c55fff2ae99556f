from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.plan import Evidence, Target
from fasttrain.source.read import find_local_rank

FRAMEWORKS = {
    # torch, by each way to name a thing
    "import torch.distributed as dist\ndist.init_process_group('gloo')": "init_process_group",
    "import torch.distributed\ntorch.distributed.init_process_group()": "init_process_group",
    "import torch\ntorch.distributed.init_process_group()": "init_process_group",
    "from torch import distributed\ndistributed.init_process_group()": "init_process_group",
    "from torch.distributed import init_process_group as ipg\nipg()": "init_process_group",
    "from torch.distributed import *\ninit_process_group()": "init_process_group",
    "import torch.distributed as d\nstart = d.init_process_group\nstart()": "init_process_group",
    "from torch.distributed import init_device_mesh as m\nm('cpu', (2,))": "init_device_mesh",
    "from torch.distributed.device_mesh import init_device_mesh\n"
    "init_device_mesh('cuda', (2,))": "init_device_mesh",
    "import torch.nn as nn\nnn.parallel.DistributedDataParallel(net)": "DistributedDataParallel",
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "DDP(net)": "DistributedDataParallel",
    "from torch.nn.parallel.distributed import DistributedDataParallel as DDP\n"
    "DDP(n)": "DistributedDataParallel",
    "from torch.utils.data import DistributedSampler\nDistributedSampler(d)": "DistributedSampler",
    "from torch.utils.data.distributed import DistributedSampler as S\nS(d)": "DistributedSampler",
    "import torch\ntorch.utils.data.distributed.DistributedSampler(d)": "DistributedSampler",
    "from torch.distributed.fsdp import fully_shard\nfully_shard(net)": "fully_shard",
    "from torch.distributed._composable.fsdp import fully_shard\nfully_shard(n)": "fully_shard",
    "from torch.distributed.fsdp import FullyShardedDataParallel as F\n"
    "F(net)": "FullyShardedDataParallel",
    "import torch.distributed.rpc as rpc\nrpc.init_rpc('w')": "init_rpc",
    # what is built on it
    "from accelerate import Accelerator\naccelerator = Accelerator()": "Accelerator",
    "import accelerate\naccelerate.PartialState().device": "PartialState",
    "from accelerate.state import PartialState\nPartialState()": "PartialState",
    "import lightning as L\nL.Trainer()": "lightning.Trainer",
    "import lightning.pytorch as pl\npl.Trainer(max_epochs=1).fit(m)": "lightning.Trainer",
    "from lightning.pytorch.cli import LightningCLI\nLightningCLI(M)": "lightning.LightningCLI",
    "from lightning.fabric import Fabric\nFabric()": "lightning.Fabric",
    "from lightning_fabric import Fabric\nFabric()": "lightning_fabric.Fabric",
    "import pytorch_lightning as pl\npl.Trainer()": "pytorch_lightning.Trainer",
    "import pytorch_lightning as p\np.Trainer.from_argparse_args(a)": "pytorch_lightning.Trainer",
    "from transformers import Trainer\nTrainer(model)": "transformers.Trainer",
    "from transformers.trainer import Trainer\nTrainer(model)": "transformers.Trainer",
    "import transformers as t\nt.Seq2SeqTrainer()": "transformers.Seq2SeqTrainer",
    "from transformers import Trainer\nclass Mine(Trainer): pass": "transformers.Trainer",
    "import transformers\nclass M(Mixin, transformers.Trainer): 0": "transformers.Trainer",
    "from trl import SFTTrainer\nSFTTrainer(m)": "trl.SFTTrainer",
    "from trl import GRPOTrainer as G\nclass Mine(G[int]): pass": "trl.GRPOTrainer",
    "import deepspeed\nengine, *_ = deepspeed.initialize(model=m)": "deepspeed.initialize",
    "import deepspeed as ds\nds.init_distributed()": "deepspeed.init_distributed",
    "from mmengine.runner import Runner\nRunner.from_cfg(cfg).train()": "mmengine.Runner",
    "from mmengine.runner import Runner\nRunner(model)": "mmengine.Runner",
    "from mmengine.dist import init_dist\ninit_dist('pytorch')": "mmengine.init_dist",
    "from mmcv.runner import init_dist\ninit_dist('pytorch')": "mmcv.init_dist",
    "import horovod.torch as hvd\nhvd.init()": "horovod.init",
    "import colossalai\ncolossalai.launch_from_torch()": "colossalai.launch_from_torch",
    "import colossalai\ncolossalai.launch(config={})": "colossalai.launch",
    "import ignite.distributed as idist\nwith idist.Parallel('nccl') as p: 0": "ignite.Parallel",
    "from ignite import distributed as idist\nidist.initialize('nccl')": "ignite.initialize",
    "from composer import Trainer\nTrainer(model=m)": "composer.Trainer",
    "from fairscale.nn import FullyShardedDataParallel as F\n"
    "F(m)": "fairscale.FullyShardedDataParallel",
    "from fairscale.optim.oss import OSS\nOSS(p)": "fairscale.OSS",
    "from timm import utils\nutils.init_distributed_device(args)": "timm.init_distributed_device",
}


@pytest.mark.parametrize(("source", "what"), FRAMEWORKS.items())
def test_a_framework_that_is_used(seen, source, what):
    line = source.count("\n") + 1
    assert seen(source) == (what, f"train.py:{line}")


@pytest.mark.parametrize(
    ("variable", "expression"),
    [
        ("RANK", 'os.environ["RANK"]'),
        ("LOCAL_RANK", "int(os.environ['LOCAL_RANK'])"),
        ("WORLD_SIZE", 'os.environ.get("WORLD_SIZE")'),
        ("RANK", 'int(os.environ.get("RANK", -1)) != -1'),
        ("RANK", 'os.environ.get(key="RANK")'),
        ("LOCAL_RANK", 'os.getenv("LOCAL_RANK", "0")'),
        ("RANK", '"RANK" in os.environ'),
        ("RANK", 'if "RANK" not in os.environ: pass'),
        ("WORLD_SIZE", 'x = "WORLD_SIZE" in os.environ and 1'),
        ("RANK", '"RANK" in os.environ.keys()'),
        ("RANK", 'os.environ["RANK"] = "0"'),
        ("RANK", 'os.environ.setdefault("RANK", "0")'),
        ("RANK", 'os.environ.update(RANK="0")'),
        ("RANK", 'os.environ.update({"A": "0", "RANK": "0"})'),
        ("LOCAL_RANK", 'del os.environ["LOCAL_RANK"]'),
        ("RANK", 'env = os.environ; env["RANK"]'),
        ("RANK", 'env: dict = os.environ; env.get("RANK")'),
        ("RANK", 'from os import environ; environ["RANK"]'),
        ("RANK", 'from os import environ as e, getenv as g; g("RANK")'),
        ("RANK", 'import os as system; system.environ["RANK"]'),
        ("RANK", 'f"""{os.environ["RANK"]}"""'),
        ("RANK", 'x = [r for r in [1] if (lambda: os.environ["RANK"])()]'),
    ],
)
def test_a_variable_of_the_ranks(seen, variable, expression):
    assert seen(f"import os\n{expression}") == (f'os.environ["{variable}"]', "train.py:2")


def test_the_import_of_a_submodule_names_the_package(seen):
    assert seen('import os.path\nos.environ["RANK"]') == ('os.environ["RANK"]', "train.py:2")


@pytest.mark.parametrize(
    ("option", "call"),
    [
        ("--local_rank", 'p.add_argument("--local_rank", type=int)'),
        ("--local-rank", 'p.add_argument("--local-rank", "-l", type=int)'),
        ("--local_rank", "ArgumentParser().add_argument('-r', '--local_rank')"),
    ],
)
def test_the_option_that_old_launchers_hand_over(seen, option, call):
    assert seen(f"\n{call}") == (option, "train.py:2")


@pytest.mark.parametrize(
    "source",
    [
        "",
        # an import is no use, nor is a mere mention
        "from accelerate import Accelerator",
        "import torch.distributed as dist\ndist.get_rank; dist.is_available()",
        "from torch.nn.parallel import DistributedDataParallel as D\nisinstance(net, D)",
        "from transformers import Trainer\ndef f(trainer: Trainer) -> Trainer: ...",
        "from accelerate import Accelerator\n'Accelerator()'\n# Accelerator()",
        "import torch.distributed as dist\n'dist.init_process_group()'",
        # one process
        "import torch.nn as nn\nnn.DataParallel(net)",
        "from torch.nn.parallel import DataParallel\nDataParallel(net)",
        "import torch.multiprocessing as mp\nmp.get_context('spawn')",
        # other things of these packages, and things of those names elsewhere
        "from transformers import AutoModel, set_seed\nset_seed(1); AutoModel.from_pretrained('x')",
        "from accelerate.utils import set_seed\nset_seed(1)",
        "from trl import SFTConfig\nSFTConfig()",
        "from lightning import LightningModule, seed_everything\nseed_everything(1)",
        "from mmengine.config import Config\nConfig.fromfile('x')",
        "class Trainer: pass\nclass Mine(Trainer): pass\nTrainer()",
        "from lightning import *\nclass Trainer: pass\nTrainer()",
        "def init_process_group(): ...\ninit_process_group()",
        "from torchaccelerate import Accelerator\nAccelerator()",
        "from accelerate_tools import Accelerator\nAccelerator()",
        "class A:\n  def run(self): self.dist.init_process_group()",
        # words that look like ranks
        "args.world_size; args.local_rank; cfg['RANK']; cfg.get('RANK')",
        "import os\nos.environ['CUDA_VISIBLE_DEVICES']; os.environ.get('PRERANK')",
        "import os\nos.environ.get('HOME', 'RANK'); os.getenv('A', default='RANK')",
        "import os\n'os.environ[\"RANK\"]'",
        "import os\nenv = dict(os.environ); env['RANK'] = '1'",
        "import os\nname = 'RANK'\n# os.environ['RANK']",
        "import os\n'RANK' in text; 'RANK' == os.environ; 'RANK' in os",
        "import config\nconfig.values['RANK']; config.get('RANK'); 'RANK' in config.values",
        "p.add_argument('--rank'); p.add_argument('--world-size', help='--local_rank')",
        "p.parse_args(['--local_rank', '1']); log.info('--local_rank')",
    ],
)
def test_what_tells_of_no_ranks(seen, source):
    assert seen(source) is None


@pytest.mark.parametrize(
    "source",
    [
        "if TYPE_CHECKING: Accelerator()",
        "import typing as t\nif t.TYPE_CHECKING:\n  Accelerator()",
        "if not TYPE_CHECKING: pass\nelse: Accelerator()",
        "if TYPE_CHECKING and x: Accelerator()",
        "if x: pass\nelif TYPE_CHECKING: Accelerator()",
        "if False: Accelerator()",
        "if __name__ != 'x' and 0: Accelerator()",
        "if __name__ == '__main__': pass\nelse: Accelerator()",
    ],
)
def test_code_that_never_runs_does_not_count(seen, source):
    start = "from typing import TYPE_CHECKING\nfrom accelerate import Accelerator\n"
    assert seen(start + source) is None


@pytest.mark.parametrize(
    "source",
    [
        "if TYPE_CHECKING: pass\nelse: Accelerator()",
        "if not TYPE_CHECKING: Accelerator()",
        "if TYPE_CHECKING or x: Accelerator()",
        "if x: pass\nelif y: Accelerator()",
        "if __name__ == '__main__': Accelerator()",
        "if Accelerator(): pass",
        "def f():\n  try: pass\n  except E: return Accelerator()",
        "class A:\n  async def f(self):\n    async with Accelerator(): pass",
        "match x:\n  case True if Accelerator(): pass",
        "@Accelerator()\ndef f(): ...",
        "def f(a=Accelerator()): ...",
        "lambda: [Accelerator() for _ in x]",
    ],
)
def test_code_that_may_run_counts(seen, source):
    found = seen("from accelerate import Accelerator\n" + source)
    assert found is not None
    assert found[0] == "Accelerator"


def test_an_import_inside_a_function_names_things_too(seen):
    source = "def f():\n  from accelerate import Accelerator as A\n  A()"
    assert seen(source) == ("Accelerator", "train.py:3")


def test_either_of_two_imports_may_be_the_one(seen):
    source = (
        "try: from mine import Launcher as A\nexcept ImportError: from accelerate import "
        "Accelerator as A\nA()"
    )
    assert seen(source) == ("Accelerator", "train.py:3")


def test_the_strongest_sign_is_told(seen):
    option, variable = 'p.add_argument("--local_rank")\n', 'import os\nos.environ["RANK"]\n'
    framework = "import torch.distributed as dist\ndist.init_process_group()\n"
    assert seen(option + variable) == ('os.environ["RANK"]', "train.py:3")
    assert seen(option + variable + framework) == ("init_process_group", "train.py:5")


def test_a_stronger_sign_in_a_later_module_goes_before_a_weaker_one(seen):
    files = {
        "train.py": "import os, helper\nos.environ['RANK']\n",
        "helper.py": "import accelerate\naccelerate.Accelerator()\n",
    }
    assert seen(files) == ("Accelerator", "helper.py:2")


def test_of_equal_signs_the_one_nearest_to_the_script_is_told(seen):
    use = "import accelerate\naccelerate.Accelerator()\naccelerate.PartialState()\n"
    files = {"train.py": "import b, a\n", "a.py": use, "b.py": "import far\n", "far.py": use}
    assert seen(files) == ("Accelerator", "a.py:2")
    assert seen({**files, "b.py": "import far\n" + use}) == ("Accelerator", "b.py:3")
    assert seen({**files, "train.py": "import a\n\n\n" + use}) == ("Accelerator", "train.py:5")


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("import os\nos.environ['RANK']\nos.environ['LOCAL_RANK']\n",
         'os.environ["LOCAL_RANK"]', 3),
        ("import torch.distributed as d\nd.init_process_group()\nimport os\n"
         "os.getenv('LOCAL_RANK', 0)\n", 'os.environ["LOCAL_RANK"]', 4),
        ("p.add_argument('--local_rank')\n", "--local_rank", 1),
        ("import os\nos.environ['RANK']\n", "", 0),
        ("import torch.distributed as d\nd.init_process_group()\n", "", 0),
    ],
)  # fmt: skip
def test_where_the_local_rank_is_read(
    lay: Any, tmp_path: Path, text: str, what: str, line: int
) -> None:
    lay({"train.py": text})
    expected = Evidence(what, f"train.py:{line}") if what else None
    target = Target("script", "train.py", ())
    assert find_local_rank(target, str(tmp_path), {}, lambda _: None) == expected
    assert find_local_rank(Target("command", "train.py", ()), str(tmp_path), {}) is None
