"""A small speech recognizer: convolution, bidirectional GRU, CTC loss, greedy decoding."""
import torch
from torch import nn


class Recognizer(nn.Module):
    def __init__(self, n_mels=8, vocab=6):
        super().__init__()
        self.conv = nn.Conv1d(n_mels, 12, 3, stride=2, padding=1)
        self.rnn = nn.GRU(12, 10, bidirectional=True, batch_first=True)
        self.out = nn.Linear(20, vocab)

    def forward(self, mels):
        h = torch.relu(self.conv(mels)).transpose(1, 2)
        h, _ = self.rnn(h)
        return self.out(h).log_softmax(-1)


torch.manual_seed(40)
model = Recognizer()
ctc = nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
mels = torch.randn(4, 8, 30)
lengths = torch.tensor([15, 13, 15, 11])
targets = torch.randint(1, 6, (4, 5))
target_lengths = torch.tensor([5, 4, 3, 5])
for step in range(5):
    log_probs = model(mels).transpose(0, 1)
    loss = ctc(log_probs, targets, lengths, target_lengths)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    print(step, loss.item().hex())
print(torch.unique_consecutive(model(mels)[0].argmax(-1)).tolist() != [])
