# ruff: noqa: T201
"""Training loops out of the ordinary, each fed by a DataLoader: the first argument names one.

Each prints its losses and saves what it trained. There is no dropout and no BatchNorm, so that
what comes out does not depend on how a batch is cut.
"""

import copy
import io
import pickle
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
x = torch.randn(92, 6)  # 12 batches, the last one of 4
y = torch.sin(x @ torch.randn(6, 2)) + 0.1 * torch.randn(92, 2)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


def mlp(outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def retain_graph():
    model = mlp()
    optimizer = sgd(model.parameters())
    for x, y in loader:
        out = model(x)
        first, second = (
            functional.mse_loss(out[:, 0], y[:, 0]),
            functional.l1_loss(out[:, 1], y[:, 1]),
        )
        optimizer.zero_grad()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        print(f"loss {first.item():.9g} {second.item():.9g}")
    return model.state_dict()


def the_same_graph_twice():
    model = mlp()
    optimizer = sgd(model.parameters())
    for x, y in loader:
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9g}")
    return model.state_dict()


def gradients_by_inputs():
    model = mlp()
    optimizer = sgd(model.parameters())
    for step, (x, y) in enumerate(loader):
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        slopes = torch.autograd.grad(loss, dict(model.named_parameters()), retain_graph=True)
        norms = {name: slope.norm().item() for name, slope in slopes.items()}
        if step % 3 == 0:
            loss.backward(inputs=model.parameters())
        elif step % 3 == 1:
            loss.backward(inputs=list(model.parameters()))
        else:
            loss.backward(inputs=model[0].weight)
        optimizer.step()
        print(f"loss {loss.item():.9g}", *(f"{name} {norm:.7g}" for name, norm in norms.items()))
    return model.state_dict()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, **factors):
        for factor in factors.values():
            x = x * factor
        return self.net(x)


def arguments_of_any_name():
    model = Named()
    optimizer = sgd(model.parameters())
    of_call = {"root": 2.0, "module": 0.5, "call": 1.0, "run": 1.0}
    of_checkpoint = {"splits": 1.0, "name": 1.0}
    for step, (x, y) in enumerate(loader):
        if step % 3:
            out = model(x, **of_call)
        else:
            out = checkpoint(model, x, use_reentrant=False, **of_checkpoint)
        loss = functional.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9g}")
    return model.state_dict()


def list_of_losses():
    trunk, heads = mlp(8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
    optimizer = sgd([*trunk.parameters(), *heads.parameters()])
    for x, y in loader:
        hidden = trunk(x)
        losses = [functional.mse_loss(head(hidden)[:, 0], y[:, i]) for i, head in enumerate(heads)]
        optimizer.zero_grad()
        torch.autograd.backward(losses)
        optimizer.step()
        print("losses", *(f"{loss.item():.9g}" for loss in losses))
    return trunk.state_dict(), heads.state_dict()


def accumulate_and_clip():
    model = mlp()
    optimizer = sgd(model.parameters())
    for _ in range(2):
        for i, (x, y) in enumerate(loader, start=1):
            loss = functional.mse_loss(model(x), y) / 5
            loss.backward()
            print(f"loss {loss.item():.9g}")
            if i % 5 == 0 or i == len(loader):  # 12 batches: the last step has two
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                print(f"gradient norm {norm:.7g}")
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def bare_parameter():
    model, temperature = mlp(), nn.Parameter(torch.tensor(1.5))
    optimizer = sgd([*model.parameters(), temperature])
    for x, y in loader:
        loss = functional.mse_loss(model(x) / temperature, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9g} temperature {temperature.item():.7g}")
    return model.state_dict(), temperature


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([mlp(), mlp(), mlp()])

    def forward(self, x, which):
        return self.branches[which](x)


def changing_branches():
    model = Branches()
    optimizer = sgd(model.parameters())
    for step, (x, y) in enumerate(loader):
        loss = functional.mse_loss(model(x, (0, 0, 1, 2, 1, 0)[step % 6]), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        unused = sum(p.grad is None for p in model.parameters())
        print(f"loss {loss.item():.9g} without gradient {unused}")
    return model.state_dict()


def unfreeze():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = sgd(model.parameters())
    for step, (x, y) in enumerate(loader):
        if step == 5:
            model[0].requires_grad_(True)
        if step == 9:
            model[2].requires_grad_(False)
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9g}")
    return model.state_dict()


def lbfgs():
    model = mlp().double()  # curvature from differences of gradients multiplies what is rounded
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for batch in loader:
        x, y = (part.double() for part in batch)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        print(f"loss {optimizer.step(closure).item():.9g}")
    return model.state_dict()


def two_models():
    encoder, decoder = mlp(4), nn.Linear(4, 6)
    optimizer = sgd([*encoder.parameters(), *decoder.parameters()])
    for x, _ in loader:
        loss = functional.mse_loss(decoder(encoder(x)), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9g}")
    return encoder.state_dict(), decoder.state_dict()


def identity():
    """Look at the model in all ways that a wrapper would show in."""
    model = mlp()
    optimizer = sgd(model.parameters())
    average = copy.deepcopy(model)
    for step, (x, y) in enumerate(loader):
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(new, 0.1)
            print(f"loss {loss.item():.9g} average {average(torch.ones(6)).sum().item():.7g}")
        if step in (0, 6):
            print(type(model).__name__, isinstance(model, nn.Sequential), list(model.state_dict()))
            print([type(m).__name__ for m in model.modules()], len(model), model)
            again = pickle.loads(pickle.dumps(model))
            twin = copy.deepcopy(model)
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=False)
            print(
                [torch.equal(m(torch.ones(6)), model(torch.ones(6))) for m in (again, twin, loaded)]
            )
            print(sorted(vars(model)), len(model._forward_hooks), len(model._forward_pre_hooks))
    return model, average, optimizer.state_dict()


def dry_run():
    with torch.device("meta"):
        model = mlp()
        model(torch.ones(8, 6)).sum().backward()
        sgd(model.parameters()).step()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    optimizer = sgd(model.parameters())
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9g}")
    return model.state_dict()


torch.save(globals()[sys.argv[1]](), "model.pt")
