"""Models in which torch reads numbers: to check what a distribution is made of, or to choose a kernel."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Independent, MultivariateNormal, Normal


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.choose, self.mean = nn.Linear(5, 3), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, x, choice, action):
        which = Categorical(logits=self.choose(x))
        how = Independent(Normal(self.mean(x), self.scale.exp().expand(len(x), 2)), 1)
        return which.log_prob(choice) + how.log_prob(action), which.entropy() + how.entropy()


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.root = nn.Linear(5, 4), nn.Parameter(torch.eye(2))

    def forward(self, x, y):
        mean, log_variance = self.a(x).chunk(2, 1)
        joint = MultivariateNormal(mean, covariance_matrix=self.root @ self.root.T + torch.eye(2))
        apart = F.gaussian_nll_loss(mean, y, log_variance.exp(), reduction="none")
        return apart.sum(1), joint.log_prob(y)


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.a, self.b = nn.Linear(1, 8), nn.Linear(8, 1)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.b(self.blocks(self.a(x[..., None]), mask=mask))[..., 0]


torch.manual_seed(22)
x, choice, action = torch.randn(30, 5), torch.randint(0, 3, (30,)), torch.randn(30, 2)
nets = nn.ModuleList(kind() for kind in (Policy, Regression, Causal))
policy, regression, causal = nets
opt = torch.optim.SGD(nets.parameters(), lr=0.05)
for step in range(9):
    rows = torch.randperm(30)[:8]
    own = x[rows]
    gain, entropy = policy(own, choice[rows], action[rows])
    apart, joint = regression(own, action[rows])
    losses = (
        -gain.mean() - 0.1 * entropy.mean(),
        apart.mean() - joint.mean(),
        F.mse_loss(causal(own)[:, :-1], own[:, 1:]),
    )
    opt.zero_grad()
    sum(losses).backward()
    opt.step()
    print("loss", *(f"{loss.item():.6g}" for loss in losses))
torch.save(nets.state_dict(), "model.pt")
