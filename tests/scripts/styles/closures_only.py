"""No class at all: a model out of closures over raw tensors, trained by SGD of its own."""
import torch

gen = torch.Generator().manual_seed(4)


def dense(n_in, n_out):
    w = (torch.randn(n_in, n_out, generator=gen) / n_in**0.5).requires_grad_()
    b = torch.zeros(n_out, requires_grad=True)
    return (lambda x: x @ w + b), [w, b]


def chain(*parts):
    params = [p for _, ps in parts for p in ps]

    def apply(x):
        for f, _ in parts[:-1]:
            x = f(x).tanh()
        return parts[-1][0](x)

    return apply, params


net, params = chain(dense(3, 10), dense(10, 10), dense(10, 1))
x = torch.randn(20, 3, generator=gen)
y = x.prod(1, keepdim=True)
for step in range(6):
    loss = ((net(x) - y) ** 2).mean()
    for p in params:
        p.grad = None
    loss.backward()
    with torch.no_grad():
        for p in params:
            p -= 0.1 * p.grad
    print(step, loss.item().hex())
print(sum(p.detach().double().sum() for p in params).item().hex())
