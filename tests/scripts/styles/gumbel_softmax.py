"""Discrete latents by straight-through Gumbel softmax with an annealed temperature."""
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(76)
encoder, decoder = nn.Linear(6, 12), nn.Linear(12, 6)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
x = (torch.rand(20, 6) > 0.5).float()
for step in range(6):
    tau = max(0.3, 0.8**step)
    logits = encoder(x).view(20, 3, 4)
    z = F.gumbel_softmax(logits, tau=tau, hard=step % 2 == 1)
    rec = F.binary_cross_entropy_with_logits(decoder(z.flatten(1)), x, reduction="none").sum(1).mean()
    q = logits.softmax(-1)
    kl = (q * (q.clamp(min=1e-8).log() + torch.log(torch.tensor(4.0)))).sum((1, 2)).mean()
    loss = rec + kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
