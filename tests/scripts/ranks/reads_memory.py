"""A loss by a Function of the script's that reads memory, as an extension in C++ does."""
import ctypes

import torch
from torch import nn


class Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, points):
        ctx.save_for_backward(points)
        points = points.contiguous()
        place = torch._C.TensorBase.data_ptr(points)  # as the object of C++ has it
        numbers = torch.tensor(list((ctypes.c_float * points.numel()).from_address(place)))
        return numbers.view(points.size(0), -1).square().sum(1)

    @staticmethod
    def backward(ctx, gradient):
        (points,) = ctx.saved_tensors
        return 2 * points * gradient[:, None, None]


torch.manual_seed(31)
net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 15), nn.Unflatten(1, (5, 3)))
opt = torch.optim.Adam(net.parameters(), lr=0.02)
for step in range(9):
    points = net(torch.randn(6, 4))
    loss = Distance.apply(points).mean() + (points.mean() - 1).square()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g} norm {net[0].weight.grad.norm():.6g}")
torch.save(net.state_dict(), "model.pt")
