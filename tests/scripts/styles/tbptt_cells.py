"""Backpropagation through overlapping windows: retain_graph over a chain of RNN cells."""
import torch
from torch import nn

torch.manual_seed(45)
cell, readout = nn.RNNCell(2, 8), nn.Linear(8, 1)
params = [*cell.parameters(), *readout.parameters()]
opt = torch.optim.SGD(params, lr=0.02)
xs = torch.randn(12, 4, 2)
ys = xs.cumsum(0)[..., :1]
h = torch.zeros(4, 8)
window, losses = [], []
for t, (x, y) in enumerate(zip(xs, ys)):
    h_in = h.detach().requires_grad_()
    h = cell(x, h_in)
    window.append((h_in, h))
    window = window[-3:]
    loss = nn.functional.mse_loss(readout(h), y)
    loss.backward(retain_graph=True)
    for i in range(len(window) - 1, 0, -1):
        grad = window[i][0].grad
        window[i - 1][1].backward(grad, retain_graph=True)
    if t % 3 == 2:
        opt.step()
        opt.zero_grad()
        window = []  # the step changed what the older graphs hold
    print(t, loss.item().hex())
