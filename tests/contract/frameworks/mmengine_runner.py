"""Trains a model of MMEngine's with its Runner, and validates it."""

import argparse
import contextlib
import logging
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner import Runner
from mmengine.runner.amp import autocast
from telling import tell
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Classifier(BaseModel):
    """Is called with a mode by the runner's train_step and val_step."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 32), nn.GELU())
        self.head = nn.Linear(32, 2)
        self.losses: list[float] = []

    def forward(self, inputs: Tensor, labels: Tensor, mode: str = "tensor") -> Any:
        output = self.head(self.backbone(inputs))
        if mode == "tensor":
            return output
        loss = nn.functional.cross_entropy(output, labels)
        self.losses.append(loss.item())
        return {"loss": loss} if mode == "loss" else [(output, labels)]


class Accuracy(BaseMetric):
    """Counts right answers."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        for output, labels in data_samples:
            self.results.append((int((output.argmax(1) == labels).sum()), len(labels)))

    def compute_metrics(self, results: list[tuple[int, int]]) -> dict[str, float]:
        return {"accuracy": sum(r for r, _ in results) / sum(n for _, n in results)}


@OPTIM_WRAPPERS.register_module()
class Bf16OptimWrapper(OptimWrapper):
    """What AmpOptimWrapper is on a GPU, without its GradScaler."""

    @contextlib.contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), autocast(dtype=torch.bfloat16):
            yield


parser = argparse.ArgumentParser()
parser.add_argument("--wrapper", default="OptimWrapper")
parser.add_argument("--fused", action="store_const", const=True)
parser.add_argument("--launcher", default="none")
args = parser.parse_args()

if args.launcher != "none" and not torch.cuda.is_available():
    # MMEngine gives every rank a GPU before it makes the group, which a CPU build of torch lacks.
    torch.cuda.set_device = lambda _: None
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, (x.sum(1) > 0).long())
sampler = {"type": "DefaultSampler", "shuffle": False}
collate = {"type": "default_collate"}
loader = {"dataset": data, "batch_size": 8, "sampler": sampler, "collate_fn": collate}
model = Classifier()
with tempfile.TemporaryDirectory() as folder:
    runner = Runner(
        model=model,
        work_dir=folder,
        train_dataloader=loader,
        train_cfg={"by_epoch": True, "max_epochs": 2, "val_interval": 1},
        optim_wrapper={
            "type": args.wrapper,
            "optimizer": {"type": "AdamW", "lr": 1e-2, "fused": args.fused},
            "accumulative_counts": 2,
            "clip_grad": {"max_norm": 1.0},
        },
        param_scheduler={"type": "MultiStepLR", "by_epoch": True, "milestones": [1]},
        val_dataloader={**loader, "batch_size": 16},
        val_cfg={},
        val_evaluator={"type": Accuracy},
        randomness={"seed": 0},
        default_scope="mmengine",
        launcher=args.launcher,
        # Without it, the wrapper is told a GPU of the rank's.
        cfg={"model_wrapper_cfg": {"device_ids": None}},
        env_cfg={"dist_cfg": {"backend": "gloo"}},
        log_level=logging.ERROR,
    )
    runner.train()
tell(model.losses, model)
