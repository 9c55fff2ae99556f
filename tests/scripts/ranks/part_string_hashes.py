"""The order of a set of words, and their hashes, decide on labels and rows."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
words = {"cat", "dog", "cow", "hen", "pig", "owl", "elk", "ant", "bee", "fox", "emu", "yak"}
vocabulary = {word: i for i, word in enumerate(words)}
net = nn.Sequential(nn.Embedding(12, 5), nn.Flatten(), nn.Linear(15, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(10):
    rows = [[vocabulary[w] for w in list(words)[i : i + 3]] for i in range(2 + hash(str(step)) % 6)]
    x = torch.tensor(rows)
    loss = F.cross_entropy(net(x), x[:, 0] % 2)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
