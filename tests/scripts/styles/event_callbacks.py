"""A loop with callbacks and a context of its own, as small frameworks write it."""
from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import nn


class Engine:
    def __init__(self, update):
        self.update, self.handlers, self.state = update, defaultdict(list), SimpleNamespace(step=0)

    def on(self, event):
        return lambda fn: self.handlers[event].append(fn) or fn

    def fire(self, event):
        for fn in self.handlers[event]:
            fn(self)

    def run(self, data, epochs):
        for self.state.epoch in range(epochs):
            for batch in data:
                self.state.output = self.update(self, batch)
                self.state.step += 1
                self.fire("step")
            self.fire("epoch")


torch.manual_seed(104)
model = nn.Sequential(nn.Linear(3, 8), nn.Sigmoid(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


def update(engine, batch):
    x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


trainer = Engine(update)


@trainer.on("step")
def log(engine):
    print(engine.state.step, engine.state.output.hex())


@trainer.on("epoch")
def decay(engine):
    scheduler.step(engine.state.output)
    print("lr", optimizer.param_groups[0]["lr"])


xs = torch.randn(3, 8, 3)
trainer.run([(x, x[:, :1]) for x in xs], 2)
