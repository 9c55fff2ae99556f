"""Trains a classifier with Lightning's Trainer, and validates it."""

import argparse
import logging
import warnings

import lightning
import torch
from telling import tell
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*does not have many workers.*")


class Classifier(lightning.LightningModule):
    """Calls itself in training, and its layers in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        x, y = batch
        self.losses.append(nn.functional.cross_entropy(self.layers(x), y).item())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2, fused=args.fused)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }


parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="32-true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--fused", action="store_const", const=True)
parser.add_argument("--devices", type=int, default=1)
args = parser.parse_args()

lightning.seed_everything(0, verbose=False)
x = torch.randn(64, 8)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = Classifier()
if args.compile:
    model.layers = torch.compile(model.layers, backend="aot_eager")
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=args.devices,
    strategy="ddp" if args.devices > 1 else "auto",
    precision=args.precision,
    max_epochs=2,
    num_sanity_val_steps=0,
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, batch_size=8), DataLoader(data, batch_size=16))
tell(model.losses, model)
