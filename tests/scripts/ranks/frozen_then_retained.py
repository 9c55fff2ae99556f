"""Freezes what it has trained, and trains another model by passes that keep their graphs."""
import torch
from torch import nn

torch.manual_seed(1)
encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(encoder.parameters(), 0.1)
for step in range(5):
    loss = encoder(torch.randn(9, 6)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.6f}")
encoder.requires_grad_(False)
head = nn.Linear(6, 2)
optimizer = torch.optim.SGD(head.parameters(), 0.1)
for step in range(5):
    out = head(torch.randn(9, 6))
    optimizer.zero_grad()
    out[:, 0].pow(2).mean().backward(retain_graph=True)
    out[:, 1].pow(2).mean().backward(create_graph=step > 2)
    optimizer.step()
    print(step, f"{out.mean().item():.6f}")
image = torch.rand(3, 6, requires_grad=True)
optimizer = torch.optim.SGD([image], 1.0)
for step in range(4):
    optimizer.zero_grad()
    loss = encoder[:2](image).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.6f}")
encoder.requires_grad_(True)
optimizer = torch.optim.SGD(encoder.parameters(), 0.1)
for step in range(4):
    loss = encoder(torch.randn(9, 6)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.6f}")
torch.save({"encoder": encoder.state_dict(), "head": head.state_dict(), "image": image}, "model.pt")
