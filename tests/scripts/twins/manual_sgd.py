# a name classifier trained without torch.optim, after the char-rnn tutorial
import torch
import torch.nn as nn

from by_hand import autocast, normalised, scaler

torch.manual_seed(0)
learning_rate = 0.05
n_letters, n_hidden, n_categories = 10, 16, 3


class RNN(nn.Module):
    def __init__(self, input_size, hidden_size, output_size):
        super(RNN, self).__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size + hidden_size, hidden_size)
        self.h2o = nn.Linear(hidden_size, output_size)
        self.softmax = nn.LogSoftmax(dim=1)

    def forward(self, input, hidden):
        combined = torch.cat((input, hidden), 1)
        hidden = torch.tanh(self.i2h(combined))
        return self.softmax(self.h2o(hidden)), hidden

    def initHidden(self):
        return torch.zeros(1, self.hidden_size)


rnn = RNN(n_letters, n_hidden, n_categories)
criterion = nn.NLLLoss(weight=torch.tensor([1.0, 1.0, 3.0]), reduction="sum")


def train(category_tensor, line_tensor):
    hidden = rnn.initHidden()
    rnn.zero_grad()
    for i in range(line_tensor.size(0)):
        with autocast():
            output, hidden = rnn(line_tensor[i], hidden)
        output, hidden = normalised(output.float(), logarithms=True), hidden.float()
    loss = criterion(output, category_tensor)
    scaler.scale(loss).backward()
    # a GradScaler unscales, checks and skips for optimizers only
    scale = scaler.get_scale()
    if all(p.grad.isfinite().all() for p in rnn.parameters()):
        for p in rnn.parameters():
            p.data.add_(p.grad.data / scale, alpha=-learning_rate)
    else:
        scaler.update(scale / 2)
        scaler.skipped += 1
    return output, loss.item()


current_loss = 0
for iter in range(1, 31):
    category = torch.randint(0, n_categories, (1,))
    letters = (torch.arange(4) * (category + 1) + torch.randint(0, 3, (4,))) % n_letters
    line = nn.functional.one_hot(letters, n_letters).float().unsqueeze(1)
    output, loss = train(category, line)
    current_loss += loss
    if iter % 10 == 0:
        print("%d %d%% %.4f" % (iter, iter / 30 * 100, current_loss / 10))
        current_loss = 0

print(f"final loss {loss:.9g}")
scaler.report()
torch.save(rnn.state_dict(), "model.pt")
