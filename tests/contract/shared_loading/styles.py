"""Reads DataLoaders with workers in many styles, and prints what each of them gave."""

import collections
import dataclasses
import hashlib
import multiprocessing
import pickle
import random
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

Pair = collections.namedtuple("Pair", "x y")  # noqa: PYI024


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str


class Augmented(Dataset):
    """Draws from all three generators."""

    def __init__(self, length=24):
        self.length = length
        self.calls = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.calls += 1
        noise = random.random() + float(np.random.rand())
        return torch.randn(6) + noise, torch.tensor([float(index + self.calls)])


class Uneven(IterableDataset):
    """Its workers come to their ends at other times."""

    def __iter__(self):
        worker = get_worker_info().id
        for number in range(7 if worker else 19):
            time.sleep(0.004 * random.random())
            yield torch.tensor([worker, number])


class Broken(Augmented):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def __getitem__(self, index):
        if index == 11:
            raise self.error
        return super().__getitem__(index)


class Stops(Augmented):
    def __getitem__(self, index):
        if index == 9:
            raise StopIteration
        return super().__getitem__(index)


class Huge(Augmented):
    def __getitem__(self, index):
        return torch.full((25_000_000,), float(index))


def seed_worker(number):
    random.seed(number)
    if number == 0:  # one of them, since they print in any order
        print("worker", number, flush=True)


def mixed(samples):
    x = torch.stack([x for x, _ in samples])
    wide = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    return {
        "x": x, "view": x[:, 1:3], "pair": Pair(x, [y for _, y in samples]), "none": None,
        "record": Record(x[0], "é"), "wide": wide, "sparse": x.to_sparse(), "empty": x[:0],
        "half": x.bfloat16(), "truth": x > 0, "complex": torch.complex(x, x), "bytes": b"\0" * 9,
        "array": np.arange(len(samples)), "parameter": nn.Parameter(x[0].clone()), "set": {1, 2},
        "objects": np.array([None, "a"], dtype=object), "number": np.float32(0.5),
    }  # fmt: skip


def only_lists(samples):
    return samples


def flat(value):
    """Yield bytes that stand for all that is in a batch."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        yield f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.requires_grad}".encode()
        yield value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, torch.Tensor):
        yield from flat(value.coalesce().values())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield value.tobytes()
    elif isinstance(value, dict):
        for key in value:
            yield from (str(key).encode(), *flat(value[key]))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    elif isinstance(value, Record):
        yield from (*flat(value.x), value.name.encode())
    else:
        yield f"{type(value).__name__} {value}".encode()


def show(name, batches):
    digest, count = hashlib.sha256(), 0
    for batch in batches:
        count += 1
        for part in flat(batch):
            digest.update(part)
    print(name, count, digest.hexdigest()[:16], flush=True)


def loader(data=None, **options):
    options = {"batch_size": 4, "num_workers": 2, **options}
    return DataLoader(Augmented() if data is None else data, **options)


def show_error(name, batches):
    try:
        show(name, batches)
    except Exception as error:
        print(name, type(error).__name__, str(error).splitlines()[0])


def in_place(batches):
    for batch in batches:
        view, x = batch["view"], batch["x"]
        x.mul_(2)
        yield view, x


def train():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    held_out = loader(Augmented(12), num_workers=1)
    for epoch in range(2):
        for x, y in loader(shuffle=True):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", float(loss))
        with torch.no_grad():
            print("held out", epoch, sum(float((model(x) - y).sum()) for x, y in held_out))


def main():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    train()
    show("plain", loader(shuffle=True))
    kept = loader(shuffle=True, persistent_workers=True, prefetch_factor=3)
    for epoch in range(3):
        show(f"persistent {epoch}", kept)
        print("children", len(multiprocessing.active_children()))
    for number, _ in enumerate(kept):
        if number == 2:
            break
    show("persistent after a break", kept)
    for number, _ in enumerate(loader()):
        if number == 1:
            break
    del kept
    left = iter(loader(persistent_workers=True))
    next(left)
    show("two at once", zip(loader(), loader(num_workers=1), left, strict=False))
    del left
    show("nested", ((x, list(loader(batch_size=12, num_workers=1))) for x, _ in loader()))
    show("mixed", loader(collate_fn=mixed, worker_init_fn=seed_worker))
    show("changed in place", in_place(loader(collate_fn=mixed)))
    show("lists", loader(collate_fn=only_lists))
    show("single", loader(batch_size=None))
    show("by arrival", loader(num_workers=1, in_order=False))
    show("timeout", loader(timeout=30, drop_last=True, pin_memory=True))
    generator = torch.Generator().manual_seed(5)
    show("own generator", loader(shuffle=True, generator=generator))
    show("iterable", sorted(map(bytes, map(pickle.dumps, (x.tolist() for x in loader(Uneven()))))))
    uneven = loader(Uneven(), persistent_workers=True)
    for epoch in range(2):
        show(f"uneven {epoch}", sorted(x.tolist() for x in uneven))
    show_error("error", loader(Broken(KeyError("gone"))))
    show("huge", loader(Huge(4), batch_size=1))
    counter = multiprocessing.Value("i", 0)
    show("shared value", loader(Counted(counter)))
    print("counted", counter.value, "next", torch.rand(1).item(), random.random(), np.random.rand())
    if len(sys.argv) > 1:  # what takes seconds
        show_error("stop", loader(Stops(), num_workers=1))
    for method in sys.argv[1:]:
        show(method, loader(num_workers=1, multiprocessing_context=method))


class Counted(Augmented):
    def __init__(self, counter):
        super().__init__()
        self.counter = counter

    def __getitem__(self, index):
        with self.counter:
            self.counter.value += 1
        return super().__getitem__(index)


if __name__ == "__main__":
    main()
