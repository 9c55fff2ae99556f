"""Tagger for sequences of unequal lengths; sequences of about the same length share a batch."""
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD = 0
VOCAB, TAGS = 30, 5  # word 0 and tag 0 are the padding


class TaggedSentences(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(3, 15, (1,), generator=g))
            words = torch.randint(1, VOCAB, (length,), generator=g)
            # the tag depends on the word and on the one before it
            before = torch.cat([words.new_zeros(1), words[:-1]])
            self.items.append((words, 1 + 2 * (words > 15) + (before > 15)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, idx):
        return self.items[idx]


class BucketBatchSampler:
    """Batches of indices whose sequences have similar lengths, in another order each epoch."""

    def __init__(self, lengths, batch_size, seed=0):
        self.by_length = sorted(range(len(lengths)), key=lambda i: lengths[i])
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        n = self.batch_size
        batches = [self.by_length[i:i + n] for i in range(0, len(self.by_length), n)]
        for k in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[k]

    def __len__(self):
        return (len(self.by_length) + self.batch_size - 1) // self.batch_size


def collate(batch):
    words, tags = zip(*batch)
    words = pad_sequence(words, batch_first=True, padding_value=PAD)
    tags = pad_sequence(tags, batch_first=True, padding_value=PAD)
    return words, tags


class Tagger(nn.Module):
    def __init__(self, dim=16, hidden=24):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.out = nn.Linear(hidden, TAGS)

    def forward(self, words):
        states, _ = self.gru(self.embedding(words))
        return self.out(states)


def evaluate(model, loader, device):
    model.eval()
    right = tokens = 0
    for words, tags in loader:
        words, tags = words.to(device), tags.to(device)
        with torch.no_grad():
            predicted = model(words).argmax(-1)
        mask = tags != PAD
        right += (predicted == tags)[mask].sum().item()
        tokens += mask.sum().item()
    return right, tokens


def main():
    torch.manual_seed(8)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, dev_set = TaggedSentences(100, seed=1), TaggedSentences(40, seed=2)
    sampler = BucketBatchSampler([len(words) for words, _ in train_set], batch_size=12)
    train_loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=collate)
    dev_loader = DataLoader(dev_set, batch_size=16, collate_fn=collate)

    model = Tagger().to(device)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

    step = 0
    for epoch in range(1, 5):
        model.train()
        for words, tags in train_loader:
            words, tags = words.to(device), tags.to(device)
            model.zero_grad()
            scores = model(words)
            loss = criterion(scores.view(-1, TAGS), tags.view(-1))
            loss.backward()
            optimizer.step()
            step += 1
            print(f"step {step} loss {loss.item():.9g}")
        right, tokens = evaluate(model, dev_loader, device)
        print(f"epoch {epoch}: {right} of {tokens} tags right ({right / tokens:.4f})")

    print(f"final loss {loss.item():.9g}")
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step},
               "model.pt")


if __name__ == "__main__":
    main()
