"""Dropout in attention, in embeddings and by F.dropout; kept attention weights."""
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), nn.Linear(8, 10)

    def forward(self, x):
        h = F.dropout(self.embed(x), 0.1, self.training)
        h = h + F.scaled_dot_product_attention(h, h, h, dropout_p=0.1 if self.training else 0.0)
        out, self.weights = self.attend(h, h, h)
        return self.head(self.layer(h + out))


torch.manual_seed(223)
model = Net()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(6):
    x = torch.randint(0, 10, (6, 5))
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.6g} weights {tuple(model.weights.shape)}")
del model.weights
torch.save(model.state_dict(), "model.pt")
