from __future__ import print_function
import argparse
import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F

parser = argparse.ArgumentParser(description='Autoencoder Example')
parser.add_argument('--batch-size', type=int, default=16, metavar='N')
parser.add_argument('--epochs', type=int, default=4, metavar='N')
parser.add_argument('--seed', type=int, default=1, metavar='S')
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Glyphs(torch.utils.data.Dataset):
    """Rows and columns of a 6x6 grid, some of them on."""

    def __init__(self, n, offset):
        self.n = n
        self.offset = offset

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(self.offset + index)
        rows = torch.rand(6, 1, generator=g) > 0.5
        columns = torch.rand(1, 6, generator=g) > 0.2
        return (rows & columns).to(torch.get_default_dtype()).unsqueeze(0), index


train_loader = torch.utils.data.DataLoader(
    Glyphs(104, 0), batch_size=args.batch_size, shuffle=True)
test_loader = torch.utils.data.DataLoader(
    Glyphs(36, 5000), batch_size=args.batch_size, shuffle=False)


class AE(nn.Module):
    def __init__(self):
        super(AE, self).__init__()
        self.fc1 = nn.Linear(36, 24)
        self.fc2 = nn.Linear(24, 5)
        self.fc3 = nn.Linear(5, 24)
        self.fc4 = nn.Linear(24, 36)

    def encode(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))

    def decode(self, z):
        return torch.sigmoid(self.fc4(torch.tanh(self.fc3(z))))

    def forward(self, x):
        z = self.encode(x.view(-1, 36))
        return self.decode(z), z


model = AE().to(device)
optimizer = optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)


# Reconstruction + size of the code, summed over all elements and batch
def loss_function(recon_x, x, z):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 36), reduction='sum')
    return BCE + 0.05 * torch.sum(z.pow(2))


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, z = model(data)
        loss = loss_function(recon_batch, data, z)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        print('step {} loss {:.9g}'.format(
            (epoch - 1) * len(train_loader) + batch_idx, loss.item()))
    print('====> Epoch: {} Average loss: {:.4f}'.format(
        epoch, train_loss / len(train_loader.dataset)))
    return loss


def test(epoch):
    model.eval()
    test_loss = 0
    wrong = 0
    with torch.no_grad():
        for i, (data, _) in enumerate(test_loader):
            data = data.to(device)
            recon_batch, z = model(data)
            test_loss += loss_function(recon_batch, data, z).item()
            wrong += ((recon_batch > 0.5) != (data.view(-1, 36) > 0.5)).sum().item()
    test_loss /= len(test_loader.dataset)
    print('====> Test set loss: {:.4f}, wrong pixels: {}'.format(test_loss, wrong))


if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        loss = train(epoch)
        test(epoch)
    print('final loss {:.9g}'.format(loss.item()))
    torch.save((model.state_dict(), optimizer.state_dict()), 'model.pt')
