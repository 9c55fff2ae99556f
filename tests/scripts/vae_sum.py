from __future__ import print_function
import torch
from torch import nn, optim
from torch.nn import functional as F

torch.manual_seed(1)


class VAE(nn.Module):
    def __init__(self):
        super(VAE, self).__init__()
        self.fc1 = nn.Linear(36, 24)
        self.fc21 = nn.Linear(24, 4)
        self.fc22 = nn.Linear(24, 4)
        self.fc3 = nn.Linear(4, 24)
        self.fc4 = nn.Linear(24, 36)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return self.fc4(F.relu(self.fc3(z)))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 36))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy_with_logits(recon_x, x.view(-1, 36), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def images(n):
    rows = torch.rand(n, 6, 1) > 0.5
    return (rows & (torch.rand(n, 1, 6) > 0.2)).float()


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-2)


def train(epoch, data):
    model.train()
    train_loss = 0
    for batch in data.split(16):
        optimizer.zero_grad()
        recon, mu, logvar = model(batch)
        loss = loss_function(recon, batch, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print("====> Epoch: {} Average loss: {:.4f}".format(epoch, train_loss / len(data)))
    return loss


def test(epoch, data):
    model.eval()
    with torch.no_grad():
        recon, mu, logvar = model(data)
        test_loss = loss_function(recon, data, mu, logvar).item() / len(data)
    print("====> Test set loss: {:.4f}".format(test_loss))


if __name__ == "__main__":
    train_set, test_set = images(160), images(48)
    for epoch in range(1, 4):
        loss = train(epoch, train_set)
        test(epoch, test_set)
    print(f"final loss {loss.item():.9g}")
    torch.save((model.state_dict(), optimizer.state_dict()), "model.pt")
