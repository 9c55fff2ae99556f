"""A recurrent world model is trained, then an action sequence is planned through it by gradient."""
import torch
from torch import nn

torch.manual_seed(91)
dynamics = nn.GRUCell(1, 8)
observe = nn.Linear(8, 1)
params = [*dynamics.parameters(), *observe.parameters()]
optimizer = torch.optim.Adam(params, lr=1e-2)
for step in range(4):
    actions = torch.rand(6, 10, 1) - 0.5
    truth = actions.cumsum(0)
    h, loss = torch.zeros(10, 8), 0.0
    for a, o in zip(actions, truth):
        h = dynamics(a, h)
        loss = loss + (observe(h) - o).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("model", step, loss.item().hex())
plan = torch.zeros(6, 1, 1, requires_grad=True)
planner = torch.optim.SGD([plan], lr=0.5)
for step in range(3):
    h = torch.zeros(1, 8)
    for a in plan:
        h = dynamics(a.tanh(), h)
    loss = (observe(h) - 1.0).square().sum()
    planner.zero_grad()
    loss.backward()
    planner.step()
    print("plan", step, loss.item().hex())
