"""Truncated backpropagation: sequence-first LSTM, hidden state carried, detached and reset."""
import torch
import torch.nn.functional as F
from torch import nn


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(11, 6), nn.LSTM(6, 10, num_layers=2)
        self.head = nn.Linear(10, 11)

    def forward(self, tokens, state):
        h, state = self.rnn(self.embed(tokens), state)
        return self.head(h), state

    def fresh(self, batch):
        return torch.zeros(2, batch, 10), torch.zeros(2, batch, 10)


torch.manual_seed(0)
text = (torch.arange(5 * 61) ** 2 // 7 % 11)[: 5 * 60].view(5, 60).t().contiguous()  # T x B
model = Lm()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(2):
    state = model.fresh(5)
    for i in range(0, 56, 8):
        x, y = text[i : i + 8], text[i + 1 : i + 9]
        state = tuple(s.detach() for s in state)
        out, state = model(x, state)
        loss = F.cross_entropy(out.view(-1, 11), y.reshape(-1))
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        print(f"ppl {loss.exp().item():.6g} norm {norm:.6g} state {state[1].norm().item():.6g}")
torch.save(model.state_dict(), "model.pt")
