"""Outputs that the script views as they lie in memory: by time of a GRU, or with channels last."""
import torch
import torch.nn.functional as F
from torch import nn


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(9, 6), nn.GRU(6, 7), nn.Linear(7, 9)

    def forward(self, tokens):
        h, _ = self.rnn(self.embed(tokens).transpose(0, 1))  # (time, rows, features)
        self.last = h.transpose(0, 1)[:, -2:]
        return self.head(h).transpose(0, 1)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 4, 1)

    def forward(self, images):
        return self.head(torch.relu(self.body(images)))


torch.manual_seed(17)
chars, images = CharModel(), Segmenter().to(memory_format=torch.channels_last)
opt = torch.optim.Adam([*chars.parameters(), *images.parameters()], lr=0.02)
text = torch.randint(0, 9, (400,))
for step in range(9):
    at = torch.randint(0, 390, (6 if step % 3 else 2,))  # also of one row for each of two ranks
    x = torch.stack([text[i : i + 5] for i in at])
    y = torch.stack([text[i + 1 : i + 6] for i in at])
    logits = chars(x)
    loss = F.cross_entropy(logits.transpose(0, 1).view(-1, 9), y.t().reshape(-1))
    hidden = chars.last.transpose(0, 1).view(-1, 7).pow(2).mean()
    pixels = torch.randn(4, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    classes = images(pixels)
    other = F.cross_entropy(classes.permute(0, 2, 3, 1).view(-1, 4), (pixels[:, 0] > 0).long().view(-1))
    opt.zero_grad()
    (loss + other + 0.1 * hidden).backward()
    opt.step()
    print(f"loss {loss.item():.6g} other {other.item():.6g} hidden {hidden.item():.6g} strides {classes.stride()}")
torch.save([chars.state_dict(), images.state_dict()], "model.pt")
