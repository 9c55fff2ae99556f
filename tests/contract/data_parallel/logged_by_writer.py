"""Logs, checkpoints and folders in the places that torch's SummaryWriter names."""
import logging
import os
import sys

import torch
from torch import nn

sys.path.append(sys.argv[1])
import standin_tensorboard  # noqa: E402, F401 - in the place of tensorboard
from torch.utils.tensorboard import SummaryWriter  # noqa: E402

torch.manual_seed(0)
writers = [SummaryWriter("runs/named"), SummaryWriter(comment="-by-time")]
for writer in writers:
    os.makedirs(os.path.join(writer.log_dir, "images"))
logging.basicConfig(filename=os.path.join(writers[0].log_dir, "training.log"), level=logging.INFO)
net, x, y = nn.Linear(8, 2), torch.randn(64, 8), torch.randint(0, 2, (64,))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(3):
    for rows in torch.randperm(64).split(16):
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
    logging.info("epoch %d", epoch)
    for writer in writers:
        writer.add_scalar("loss", loss.item(), epoch)
        writer.add_scalars("losses", {"train": loss.item(), "again": loss.item()}, epoch)
        torch.save(net.state_dict(), os.path.join(writer.log_dir, f"epoch_{epoch}.pt"))
for writer in writers:
    writer.close()
    writer.add_scalar("late", 1.0, 3)  # to a new file
    net.load_state_dict(torch.load(os.path.join(writer.get_logdir(), "epoch_2.pt")))
    print(sorted(name for name in os.listdir(writer.log_dir) if "events" not in name))
try:
    SummaryWriter(os.path.join(writers[0].log_dir, "training.log", "inside"))
except OSError as error:
    print("error", type(error).__name__)
print("loss", loss.item())
torch.save(net.state_dict(), "model.pt")
