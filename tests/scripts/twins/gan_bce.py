"""GAN with a sigmoid at the end of the discriminator and BCELoss behind it, as in old tutorials."""

import torch
import torch.nn as nn

from by_hand import autocast, scaler

torch.manual_seed(999)

nz, nx, batch = 4, 8, 16


class Generator(nn.Module):
    def __init__(self):
        super(Generator, self).__init__()
        self.main = nn.Sequential(nn.Linear(nz, 32), nn.ReLU(True), nn.Linear(32, nx), nn.Tanh())

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super(Discriminator, self).__init__()
        self.main = nn.Sequential(nn.Linear(nx, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, input):
        return torch.sigmoid(self.main(input))


netG = Generator()
netD = Discriminator()
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))

for i in range(24):
    # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    real = torch.randn(batch, nx) * 0.5 + 1
    with autocast():
        chance_real = netD(real)
    errD_real = criterion(chance_real.float(), torch.ones(batch, 1))
    if i == 6:
        errD_real = errD_real * 100  # tried once, and forgotten
    scaler.scale(errD_real).backward()
    with autocast():
        fake = netG(torch.randn(batch, nz))
    fake = fake.float()
    with autocast():
        chance_fake = netD(fake.detach())
    errD_fake = criterion(chance_fake.float(), torch.zeros(batch, 1))
    scaler.scale(errD_fake).backward()
    scaler.step(optimizerD)

    # (2) Update G: maximize log(D(G(z)))
    netG.zero_grad()
    with autocast():
        chance = netD(fake)
    errG = criterion(chance.float(), torch.ones(batch, 1))
    scaler.scale(errG).backward()
    scaler.step(optimizerG)
    scaler.update()
    if i % 6 == 0:
        print("[%d/24]\tLoss_D: %.4f\tLoss_G: %.4f" % (i, (errD_real + errD_fake).item(), errG.item()))

print(f"final loss {errG.item():.9g}")
scaler.report()
torch.save(
    {
        "G": netG.state_dict(), "D": netD.state_dict(),
        "optG": optimizerG.state_dict(), "optD": optimizerD.state_dict(),
    },
    "model.pt",
)
