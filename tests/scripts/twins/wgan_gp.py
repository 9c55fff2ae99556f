"""Wasserstein GAN with a gradient penalty: second derivatives through autograd.grad."""

import torch
from torch import nn
from torch.autograd import grad

from by_hand import autocast, scaler


def mlp(*sizes):
    layers = []
    for n_in, n_out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(n_in, n_out), nn.Softplus()]
    return nn.Sequential(*layers[:-1])


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(len(real), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    with autocast():
        scores = critic(mixed)
    scaled = scaler.scale(scores.float().mean())
    (scaled_slopes,) = grad(scaled, mixed, create_graph=True)
    slopes = scaled_slopes * (1.0 / scaler.get_scale())
    norms = (slopes * len(real)).norm(2, dim=1)
    return ((norms - 1) ** 2).mean()


def main(iterations=8, critic_steps=3, batch=16, weight=10.0):
    torch.manual_seed(7)
    critic, generator = mlp(6, 24, 1), mlp(3, 24, 6)
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    for it in range(iterations):
        for k in range(critic_steps):
            real = torch.randn(batch, 6) + 2
            with torch.no_grad(), autocast():
                fake = generator(torch.randn(batch, 3))
            fake = fake.float()
            opt_c.zero_grad()
            penalty = gradient_penalty(critic, real, fake)
            with autocast():
                of_fake = critic(fake)
            with autocast():
                of_real = critic(real)
            wasserstein = of_fake.float().mean() - of_real.float().mean()
            if it == 2 and k == 1:
                wasserstein = wasserstein * 1000  # a fat finger in the schedule
            loss_c = wasserstein + weight * penalty
            scaler.scale(loss_c).backward()
            scaler.step(opt_c)
            scaler.update()
        opt_g.zero_grad()
        with autocast():
            fake = generator(torch.randn(batch, 3))
        with autocast():
            score = critic(fake.float())
        loss_g = -score.float().mean()
        scaler.scale(loss_g).backward()
        scaler.step(opt_g)
        scaler.update()
        print(f"it {it} critic {loss_c.item():.5f} penalty {penalty.item():.5f} gen {loss_g:.5f}")
    print(f"final loss {loss_c.item():.9g}")
    state = {name: part.state_dict() for name, part in
             {"critic": critic, "generator": generator, "opt_c": opt_c, "opt_g": opt_g}.items()}
    scaler.report()
    torch.save(state, "model.pt")


main()
