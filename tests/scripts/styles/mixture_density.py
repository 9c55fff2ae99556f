"""A mixture density network, trained by the log likelihood of torch.distributions."""
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal


class MDN(nn.Module):
    def __init__(self, k=3):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(1, 16), nn.Tanh())
        self.logits, self.mu, self.log_sigma = (nn.Linear(16, k) for _ in range(3))

    def forward(self, x):
        h = self.hidden(x)
        parts = Normal(self.mu(h), self.log_sigma(h).clamp(-3, 3).exp())
        return MixtureSameFamily(Categorical(logits=self.logits(h)), parts)


torch.manual_seed(77)
model = MDN()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
y = torch.rand(30) * 4 - 2
x = (y + 0.5 * torch.sin(3 * y))[:, None]
for step in range(6):
    loss = -model(x).log_prob(y).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
