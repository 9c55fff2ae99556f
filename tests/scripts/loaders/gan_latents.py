"""GAN in which every sample keeps the latent vector that was drawn for it in the beginning."""

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset

manualSeed = 999
torch.manual_seed(manualSeed)

nz, nx, hidden = 4, 6, 24
num_epochs = 4
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Blobs(Dataset):
    def __init__(self, n):
        center = torch.where(torch.rand(n, 1) > 0.5, 1.0, -1.0)
        self.data = center + 0.5 * torch.randn(n, nx)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index], index


dataset, held_out = Blobs(80), Blobs(40)
latents = torch.randn(80, nz, device="cpu").to(device)
held_out_latents = torch.randn(40, nz, device="cpu").to(device)
dataloader = DataLoader(dataset, batch_size=16, shuffle=True)

netG = nn.Sequential(nn.Linear(nz, hidden), nn.Tanh(), nn.Linear(hidden, nx)).to(device)
netD = nn.Sequential(nn.Linear(nx, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1)).to(device)

criterion = nn.BCEWithLogitsLoss()
real_label = 1.
fake_label = 0.

optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))

print("Starting Training Loop...")
iters = 0
for epoch in range(num_epochs):
    for i, data in enumerate(dataloader, 0):
        # (1) Update D network
        netD.zero_grad()
        real = data[0].to(device)
        b_size = real.size(0)
        label = torch.full((b_size,), real_label, device=device)
        output = netD(real).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()

        fake = netG(latents[data[1]])
        label.fill_(fake_label)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        # (2) Update G network: fake labels are real for generator cost
        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()

        print("step %d loss %.9g" % (iters, errD.item()))
        print("step %d generator loss %.9g" % (iters, errG.item()))
        iters += 1

    with torch.no_grad():
        on_real = (netD(held_out.data.to(device)) > 0).sum().item()
        on_fake = (netD(netG(held_out_latents)) < 0).sum().item()
    print("[%d/%d]\tD right on real: %d/40\ton fake: %d/40" % (epoch, num_epochs, on_real, on_fake))

print(f"final loss {errD.item():.9g}")
torch.save(
    {
        "netG": netG.state_dict(), "netD": netD.state_dict(),
        "optimizerG": optimizerG.state_dict(), "optimizerD": optimizerD.state_dict(),
        "latents": latents.cpu(),
    },
    "model.pt",
)
