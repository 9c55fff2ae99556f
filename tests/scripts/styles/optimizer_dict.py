"""One optimizer per part, kept in a dict; each steps at its own rhythm."""
import torch
from torch import nn

torch.manual_seed(11)
parts = {"body": nn.Linear(4, 16), "head_a": nn.Linear(16, 1), "head_b": nn.Linear(16, 3)}
optimizers = {
    "body": torch.optim.AdamW(parts["body"].parameters(), lr=1e-2),
    "head_a": torch.optim.SGD(parts["head_a"].parameters(), lr=1e-2, weight_decay=1e-3),
    "head_b": torch.optim.Adadelta(parts["head_b"].parameters()),
}
every = {"body": 1, "head_a": 2, "head_b": 3}
x = torch.randn(16, 4)
ya, yb = x.sum(1, keepdim=True), x[:, :3].argmax(1)
for step in range(8):
    h = torch.tanh(parts["body"](x))
    loss_a = nn.functional.mse_loss(parts["head_a"](h), ya)
    loss_b = nn.functional.cross_entropy(parts["head_b"](h), yb)
    (loss_a + loss_b).backward()
    for name, optimizer in optimizers.items():
        if step % every[name] == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(step, loss_a.item().hex(), loss_b.item().hex())
