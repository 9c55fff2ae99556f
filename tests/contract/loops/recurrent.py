"""An LSTM whose hidden state is carried from step to step, over sequences of changing length."""

import torch
from torch import nn

call = globals().get("call", lambda module, *args: module(*args))
fused = globals().get("fused")


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.rnn = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, words, state):
        found, state = self.rnn(self.embedding(words), state)
        return self.head(found), state


torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, fused=fused)
state, losses = None, []
for step in range(20):
    length = 5 if step % 2 else 6
    words = torch.randint(0, 11, (4, length))
    logits, state = call(model, words[:, :-1], state)
    state = tuple(part.detach() for part in state)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

result = model.state_dict()
