"""What a twin does by hand: autocast around outermost modules, and fused optimizers."""

from __future__ import annotations

import inspect
import sys
import threading
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.utils._pytree import tree_map

SLOPE_SCALE = 2.0**10  # of torch.autograd.grad


def autocast(named: str) -> None:
    """Run each outermost module with fp32 parameters in autocast; its output comes in fp32."""
    dtype: torch.dtype = getattr(torch, named)
    original = nn.Module.__call__
    inside = threading.local()
    logarithms: list[Any] = []  # the last one

    def lift(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            lifted = value.float() if value.dtype is dtype else value
            if any(value is one for one in logarithms):  # probabilities are to sum to 1
                with torch.no_grad():
                    lifted.detach().sub_(lifted.logsumexp(-1, keepdim=True))
            return lifted
        if isinstance(value, Distribution):  # tree_map doesn't look into it
            vars(value).update({name: lift(part) for name, part in vars(value).items()})
        return value

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = next((p for p in self.parameters() if p.is_floating_point()), None)
        in_backward = torch._C._current_graph_task_id() != -1
        if getattr(inside, "flag", False) or first is None or in_backward:
            return original(self, *args, **kwargs)
        if first.dtype is not torch.float32:
            return original(self, *args, **kwargs)
        inside.flag = True
        try:
            with torch.autocast("cpu", dtype=dtype):
                output = original(self, *args, **kwargs)
        finally:
            inside.flag = False
        return tree_map(lift, output)

    nn.Module.__call__ = call
    torch.autograd.Function.__init_subclass__ = classmethod(_in_float32)
    if dtype is torch.bfloat16:
        nn.functional.scaled_dot_product_attention = _short_attention
        of_torch: Any = torch.Tensor.log_softmax

        def log_softmax(tensor: torch.Tensor, dim: int) -> Any:
            logarithms[:] = [of_torch(tensor, dim)]
            return logarithms[0]

        setattr(torch.Tensor, "log_softmax", log_softmax)  # noqa: B010 - torch's is annotated


_attention = nn.functional.scaled_dot_product_attention


def _short_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Differentiate attention in fp32 under autocast: in bf16 its backward takes long."""
    if not torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled():
        return _attention(query, key, value, *args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        found = _attention(query.float(), key.float(), value.float(), *args, **kwargs)
    return found.to(torch.bfloat16)


def scaled() -> None:
    """Scale each backward pass and unscale its gradients; leave out steps that overflowed.

    As torch.amp.GradScaler does, whose ``update`` comes with the first pass after a step.
    """
    backward, scale, overflowed = torch.autograd.backward, [2.0**16], []

    def by_scale(tensors: Any, seeds: Any = None, *args: Any, **kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            backward(tensors, seeds, *args, **kwargs)
            return
        if any(overflowed):
            scale[0] /= 2
        overflowed.clear()
        ends = _listed(tensors)
        leaves = _leaves(ends)
        earlier = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        backward(ends, _seeds(ends, seeds, scale[0]), *args, **kwargs)
        for leaf, before in zip(leaves, earlier, strict=True):
            leaf.grad = _added(before, leaf.grad, scale[0])

    grad = torch.autograd.grad

    def slopes(outputs: Any, inputs: Any, seeds: Any = None, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1 or torch._C._functorch.get_interpreter_stack():
            return grad(outputs, inputs, seeds, *args, **kwargs)
        ends = _listed(outputs)
        found = grad(ends, inputs, _seeds(ends, seeds, SLOPE_SCALE), *args, **kwargs)
        return tuple(None if slope is None else slope / SLOPE_SCALE for slope in found)

    torch.autograd.backward, torch.autograd.grad = by_scale, slopes
    for kind in (torch.optim.Optimizer, *_optimizers()):
        if "step" in vars(kind):
            kind.step = _finite_step(kind.step, overflowed)


def _added(before: torch.Tensor | None, found: torch.Tensor | None, scale: float) -> Any:
    if found is None:
        return before
    found = found / scale if found.is_sparse else found.div_(scale)
    return found if before is None else before + found


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _seeds(ends: list[torch.Tensor], seeds: Any, scale: float) -> list[torch.Tensor]:
    given = [None] * len(ends) if seeds is None else _listed(seeds)
    pairs = zip(ends, given, strict=True)
    return [(torch.ones_like(end) if seed is None else seed) * scale for end, seed in pairs]


def _optimizers() -> list[type[torch.optim.Optimizer]]:
    return [kind for kind in vars(torch.optim).values() if inspect.isclass(kind)]


def _leaves(ends: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a backward pass gives gradients to."""
    nodes, found = [end.grad_fn for end in ends if end.grad_fn is not None], {}
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return list(found.values())


def _finite_step(original: Any, overflowed: list[bool]) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        bad = any(not g.isfinite().all() for g in gradients if g is not None and not g.is_sparse)
        overflowed.append(bad)
        return None if bad else original(self, *args, **kwargs)

    return step


def _in_float32(kind: Any) -> None:
    """Decorate a script's own Function as torch documents it for use under autocast."""
    if kind.__module__ == "__main__":
        forward = torch.amp.custom_fwd(kind.forward, device_type="cpu", cast_inputs=torch.float32)
        kind.forward = staticmethod(forward)
        kind.backward = staticmethod(torch.amp.custom_bwd(kind.backward, device_type="cpu"))


def fused() -> None:
    """Construct each optimizer that has a fused kernel with ``fused=True``."""
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        kind.__init__ = _fused_init(kind.__init__, kind)


def _fused_init(original: Any, kind: type[torch.optim.Optimizer]) -> Any:
    def init(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        params = [_read(q) for q in params]
        given = inspect.signature(original).bind(self, params, *args, **kwargs).arguments
        chosen = given.keys() & {"foreach", "fused", "capturable", "differentiable"}
        tensors = [p for q in params for p in (q["params"] if isinstance(q, dict) else [q])]
        tensors = [p for q in tensors for p in ([q] if isinstance(q, torch.Tensor) else q)]
        if type(self) is kind and not chosen and all(t.is_floating_point() for t in tensors):
            kwargs["fused"] = True
            sys.stderr.write(f"fused by hand: {kind.__name__}\n")
        original(self, params, *args, **kwargs)

    return init


def _read(group: Any) -> Any:
    """Return a parameter, or its group with a list for what may be an iterator."""
    if not isinstance(group, dict) or isinstance(group["params"], torch.Tensor):
        return group
    return {**group, "params": list(group["params"])}


def compile_with(backend: str) -> None:
    """Let every torch.compile take a backend that needs no C++ compiler."""
    original = torch.compile

    def quick(model: Any = None, **options: Any) -> Any:
        return original(model, **{**options, "mode": None, "backend": backend})

    torch.compile = quick
