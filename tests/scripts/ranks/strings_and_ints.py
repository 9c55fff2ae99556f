"""forward takes texts and python numbers: a tokenizer in the model, lengths as ints, a list of styles."""
import torch
import torch.nn.functional as F
from torch import nn


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(128, 8), nn.Linear(8, 2)

    def forward(self, texts, numbers, longest, styles=("mean",)):
        codes = torch.zeros(len(texts), longest, dtype=torch.long)
        for row, text in enumerate(texts):
            codes[row, : len(text)] = torch.tensor([ord(c) for c in text])
        h = self.embed(codes) * (codes > 0)[..., None]
        pooled = [h.sum(1) / longest if style == "mean" else h.max(1).values for style in styles]
        return self.out(sum(pooled) * numbers[:, None])


torch.manual_seed(151)
words = ["loss", "batch", "tensor", "grad", "step", "epoch", "rank", "node", "seed", "mean", "sum"]
model = TextModel()
opt = torch.optim.Adam(model.parameters(), lr=0.05)
for step in range(8):
    texts = [words[(step * 3 + i) % 11] for i in range(6)]
    numbers = torch.tensor([float(len(t)) for t in texts]) / 4
    y = torch.tensor([int("e" in t) for t in texts])
    out = model(texts, numbers, max(map(len, texts)), styles=["mean", "max"] if step % 2 else ("mean",))
    loss = F.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    wrong = [t for t, guess, wanted in zip(texts, out.argmax(1), y) if guess != wanted]
    print(f"loss {loss.item():.6g} wrong", *wrong)
torch.save(model.state_dict(), "model.pt")
