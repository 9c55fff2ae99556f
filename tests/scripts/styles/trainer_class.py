"""A Trainer that owns model, optimizer, scheduler and loop."""
import torch
from torch import nn, optim


class Trainer:
    def __init__(self, model, lr=0.02, device="cpu"):
        self.model = model.to(device)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.1)
        self.scheduler = optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=6)
        self.history = []

    def train_one_epoch(self, batches):
        self.model.train()
        total = 0.0
        for x, y in batches:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        self.scheduler.step()
        self.history.append(total / len(batches))

    @torch.no_grad()
    def evaluate(self, batches):
        self.model.eval()
        return sum(self.criterion(self.model(x), y).item() for x, y in batches) / len(batches)

    def fit(self, batches, epochs):
        for epoch in range(epochs):
            self.train_one_epoch(batches)
            print(epoch, self.history[-1].hex(), self.evaluate(batches).hex())


torch.manual_seed(2)
data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(3)]
trainer = Trainer(nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.2), nn.GELU(), nn.Linear(20, 3)))
trainer.fit(data, 3)
print("lr", trainer.scheduler.get_last_lr()[0].hex())
