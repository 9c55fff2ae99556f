"""Seeded training loops without checkpoints: ``loops.py NAME OUT``.

In the step that STOP_AT names, a number or one for each rank, the process sends itself SIGUSR2;
rank 0 sends its launcher SIGTERM where STOP_BY says so. In step CRASH_AT rank 1 fails, once.
"""

import copy
import csv
import logging
import os
import queue
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

STOP_AT = [int(step) for step in os.environ.get("STOP_AT", "0").split(",")]
STEP = 0


def rank():
    """Which of the STOP_AT is this process's; ranks that fasttrain makes one run see none."""
    return int(os.path.basename(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])))


def stepped():
    global STEP
    STEP += 1
    if STEP == int(os.environ.get("CRASH_AT", "0")) and rank() == 1 and not restarted():
        raise RuntimeError("a crash")
    by_launcher = os.environ.get("STOP_BY") == "launcher"
    if STEP == STOP_AT[rank() if len(STOP_AT) > 1 else 0]:
        if not by_launcher:
            os.kill(os.getpid(), signal.SIGUSR2)
        elif rank() == 0:
            os.kill(parent(os.getppid()), signal.SIGTERM)
    if by_launcher and STEP >= STOP_AT[0]:
        time.sleep(0.1)  # the signal is on its way


def restarted():
    return os.environ.get("FASTTRAIN_RESTART_COUNT", "0") != "0"


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def data(count, features=6):
    x = torch.randn(count, features)
    return x, (x[:, 0] + 0.3 * x[:, 1] > 0).long()


def classifier():
    """SGD with momentum, StepLR by epoch, dropout, validation, and the best model saved."""
    x, y = data(230)
    train = DataLoader(TensorDataset(x[:150], y[:150]), batch_size=16, shuffle=True)
    valid = DataLoader(TensorDataset(x[150:], y[150:]), batch_size=32)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    best, history = -1.0, []
    for epoch in range(5):
        model.train()
        total = 0.0
        for inputs, targets in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            stepped()
            total += loss.item() * len(inputs)
        schedule.step()
        model.eval()
        hits = 0
        with torch.no_grad():
            for inputs, targets in valid:
                hits += (model(inputs).argmax(1) == targets).sum().item()
        history.append(hits)
        print(f"epoch {epoch} loss {total / 150:.9f} hits {hits} lr {schedule.get_last_lr()}", flush=True)
        if total < best or best < 0:
            best = total
            torch.save(model.state_dict(), sys.argv[2] + ".best")
    return {"model": model.state_dict(), "history": history}


class Noisy(Dataset):
    """Augments by random numbers of all three generators."""

    def __init__(self, count):
        self.x, self.y = data(count)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = torch.rand(()) + random.random() + float(numpy.random.rand())
        return self.x[index] * noise, self.y[index]


def accumulation():
    """Adam, cosine by step, four batches to a step, averaged weights by hand, a loader's own seed."""
    own = torch.Generator().manual_seed(5)
    train = DataLoader(Noisy(104), batch_size=8, shuffle=True, generator=own)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2))
    shadow = {name: value.detach().clone() for name, value in model.named_parameters()}
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    losses, count = [], 0
    for epoch in range(6):
        for number, (inputs, targets) in enumerate(train):
            with torch.no_grad():
                wanted = teacher(inputs).softmax(1)
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets) + 0.1 * F.mse_loss(outputs.softmax(1), wanted)
            (loss / 4).backward()
            losses.append(float(loss))
            if (number + 1) % 4 == 0 or number + 1 == len(train):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                count += 1
                with torch.no_grad():
                    for name, value in model.named_parameters():
                        shadow[name].mul_(0.9).add_(value, alpha=0.1)
                    for mine, its in zip(teacher.parameters(), model.parameters()):
                        mine.lerp_(its, 0.05)
                stepped()
        print(f"epoch {epoch} step {count} {sum(losses):.9f} {loss:.6f}", flush=True)
    return {"model": model.state_dict(), "shadow": shadow, "teacher": teacher.state_dict()}


def own_scaler():
    """The script's own autocast and GradScaler, whose first steps overflow."""
    x, y = data(96)
    train = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=7)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for epoch in range(8):
        for inputs, targets in train:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = 1e3 * F.cross_entropy(model(inputs).float(), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            stepped()
        plateau.step(loss)
        print(f"epoch {epoch} {loss.item():.9f} scale {scaler.get_scale()}", flush=True)
    return {"model": model.state_dict(), "scaler": scaler.state_dict()}


def steep():
    """Gradients that are too large for fp16 until the scale has come down, by steps that are skipped."""
    x, y = data(128)
    train = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(5):
        for inputs, targets in train:
            optimizer.zero_grad()
            loss = 1e3 * F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            stepped()
        print(f"epoch {epoch} {loss.item():.9f}", flush=True)
    return model.state_dict()


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out, self.calls = nn.GRU(3, 8), nn.Linear(8, 3), 0

    def forward(self, x, hidden):
        self.calls += 1
        y, hidden = self.cell(x, hidden)
        return self.out(y), hidden


def recurrent():
    """A hidden state that goes from batch to batch, read by worker processes."""
    torch.set_num_threads(1)
    text = torch.randn(240, 3)
    train = DataLoader(TensorDataset(text[:-1], text[1:]), batch_size=12, num_workers=1)
    model = Reader()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    hidden = torch.zeros(1, 8)
    for epoch in range(2):
        for inputs, wanted in train:
            optimizer.zero_grad()
            outputs, hidden = model(inputs, hidden)
            hidden = hidden.detach()
            loss = F.mse_loss(outputs, wanted)
            loss.backward()
            optimizer.step()
            stepped()
        print(f"epoch {epoch} {loss.item():.9f}", flush=True)
    return {"model": model.state_dict(), "hidden": hidden, "calls": model.calls}


def adversarial():
    """Two optimizers, a penalty by autograd.grad, and noise of the loop's own."""
    train = DataLoader(TensorDataset(torch.randn(96, 4) + 2), batch_size=16, shuffle=True)
    maker, critic = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
    for epoch in range(6):
        for (real,) in train:
            fake = maker(torch.randn(len(real), 2))
            mixed = (real + fake.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            loss = critic(fake.detach()).mean() - critic(real).mean() + slope.square().mean()
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
            of_maker.zero_grad()
            worth = -critic(fake).mean()
            worth.backward()
            of_maker.step()
            stepped()
        print(f"epoch {epoch} {loss.item():.9f} {worth.item():.9f}", flush=True)
    return {"maker": maker.state_dict(), "critic": critic.state_dict()}


def endless():
    """Batches without end, by the idiom that catches whatever comes."""
    train = DataLoader(TensorDataset(*data(60)), batch_size=8, shuffle=True)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(train)
    for step in range(25):
        try:
            inputs, targets = next(batches)
        except:
            batches = iter(train)
            inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        print(step, loss.item(), flush=True)
        stepped()
    return model.state_dict()


class Tee:
    """As it is in many scripts."""

    def __init__(self, name):
        self.terminal, self.log = sys.stdout, open(name, "a")

    def write(self, text):
        self.terminal.write(text)
        self.log.write(text)

    def flush(self):
        pass  # for compatibility


def logged():
    """Prints by way of a file, and appends to a log and a table."""
    sys.stdout = Tee("printed.txt")
    logging.basicConfig(level=logging.INFO, handlers=[logging.FileHandler("train.log")])
    train = DataLoader(TensorDataset(*data(60)), batch_size=8, shuffle=True)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        total = 0.0
        for inputs, targets in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
            stepped()
        print(epoch, total)
        logging.info("epoch %d loss %.6f", epoch, total)
        with open("log.csv", "a", newline="") as file:
            csv.writer(file).writerow([epoch, total])
    return model.state_dict()


def several():
    """One loop behind the other, each with an optimizer of its own."""
    done = []
    for loop in (own_scaler, adversarial, recurrent):
        done.append(loop())
    return done


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def fragile():
    """What changes from attempt to attempt as variables say that no script should."""
    x, y = data(int(os.environ.get("SAMPLES", "64")))
    train = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = nn.Linear(6, 2, bias="NO_BIAS" not in os.environ)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    if "OBJECT" in os.environ:
        optimizer.param_groups[0]["note"] = Path()
    if "DIE_SAVING" in os.environ:
        os.fsync = die  # when the first file of a snapshot is written
    for epoch in range(4):
        for inputs, targets in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            stepped()
            if os.environ.get("READS"):
                try:
                    loss.item()
                except:
                    if os.environ["READS"] != "and goes on":
                        raise
    return model.state_dict()


def by_hand():
    """Batches that the loop draws itself."""
    x, y = data(64)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        chosen = torch.randint(64, (8,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        stepped()
    return model.state_dict()


def read_ahead():
    """Batches that a thread reads ahead, as prefetch_generator does."""
    train = DataLoader(TensorDataset(*data(64)), batch_size=16)
    ahead = queue.Queue(1)
    threading.Thread(target=lambda: [ahead.put(batch) for batch in train], daemon=True).start()
    return ahead.get()


def with_closure():
    """An optimizer that calls its closure as often as it likes."""
    train = DataLoader(TensorDataset(*data(64)), batch_size=16)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    for inputs, targets in train:
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss
        optimizer.step(closure)
    return model.state_dict()


if __name__ == "__main__":
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    torch.save(globals()[sys.argv[1]](), sys.argv[2])
