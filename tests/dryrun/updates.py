"""Lookups that train by optimizers which fbgemm has for CUDA only, computed as its kernels there do: every touched row
once, with the sum of its gradients. Formulas are written from fbgemm's, not from rayrec's, which they are to check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

NO_POOLING = 2  # fbgemm's PoolingMode.NONE
L2, DECOUPLE = 1, 2  # fbgemm's WeightDecayMode


def on_cuda_only(name: str, arguments: dict[str, Any]) -> bool:
    """Whether fbgemm's CPU kernels do not train as `lookup_<name>` is told to."""
    if name == "rowwise_adagrad":
        return bool(arguments["optimizer_args"].weight_decay)
    return name in UPDATES


def look_up(name: str, given: Any, arguments: dict[str, Any]) -> tuple[torch.Tensor, Callable[[torch.Tensor], None]]:
    """The vectors, and what trains the tables by their gradient.

    Args:
        given: fbgemm's CommonArgs, its tensors on the CPU.
        arguments: of fbgemm's `invoke`, by name.
    """
    assert given.vbe_metadata is None or given.vbe_metadata.B_offsets is None
    edges, first_rows = given.D_offsets.tolist(), given.hash_size_cumsum.tolist()
    rows = [min(row for row in first_rows if row > first) - first for first in first_rows[:-1]]  # features share tables
    first = given.weights_offsets.tolist()
    bags = (given.offsets.numel() - 1) // len(first)
    leaves: dict[int, torch.Tensor] = {}  # by where a table begins
    features: dict[int, list[int]] = {}
    parts = []
    for feature, start in enumerate(first):
        dim = edges[feature + 1] - edges[feature]
        flat = given.host_weights[start : start + rows[feature] * dim]
        leaf = leaves.setdefault(start, flat.view(-1, dim).float().requires_grad_())
        features.setdefault(start, []).append(feature)
        offsets = given.offsets[feature * bags : (feature + 1) * bags + 1]
        ids, weights = (
            None if numbers is None else numbers[offsets[0] : offsets[-1]]
            for numbers in (given.indices, given.indice_weights)
        )
        if given.pooling_mode == NO_POOLING:
            parts.append(leaf[ids])
        else:
            sizes = (offsets - offsets[0]).to(ids.dtype)
            parts.append(
                F.embedding_bag(ids, leaf, sizes, mode="sum", per_sample_weights=weights, include_last_offset=True)
            )
    out = torch.cat(parts, 0 if given.pooling_mode == NO_POOLING else 1)
    rate = float(given.learning_rate_tensor)  # fbgemm keeps a copy from the lookup on

    def train(grad: torch.Tensor) -> None:
        torch.autograd.backward(out, grad)
        for start, leaf in leaves.items():
            of_table = features[start]
            spans = [(given.offsets[f * bags], given.offsets[(f + 1) * bags]) for f in of_table]
            touched = torch.cat([given.indices[a:b] for a, b in spans]).unique()
            if not len(touched):
                continue
            states = []
            for state in (arguments.get("momentum1"), arguments.get("momentum2")):
                if state is not None:
                    held = state.dev[int(state.offsets[of_table[0]]) :]
                    rowwise = (name, len(states)) in ROWWISE
                    size = leaf.shape[0] if rowwise else leaf.numel()
                    states.append(held[:size] if rowwise else held[:size].view(leaf.shape))
            assert leaf.grad is not None
            weight, grads, step = leaf.detach()[touched], leaf.grad[touched], [state[touched] for state in states]
            moved = UPDATES[name](weight, grads, step, rate, arguments["optimizer_args"], arguments.get("iter"))
            for state, new in zip(states, step, strict=True):
                state[touched] = new
            flat = given.host_weights[start : start + leaf.numel()]
            flat.view(leaf.shape)[touched] = moved.to(flat.dtype)

    return out, train


ROWWISE = {("rowwise_adagrad", 0), ("partial_rowwise_adam", 1), ("partial_rowwise_lamb", 1)}  # one number a row

State = list[torch.Tensor]


def _moments(grad: torch.Tensor, state: State, args: Any, count: int) -> torch.Tensor:
    square = grad.square()
    if state[1].dim() == 1:
        square = square.mean(1)
    state[0] = args.beta1 * state[0] + (1 - args.beta1) * grad
    state[1] = args.beta2 * state[1] + (1 - args.beta2) * square
    below = (state[1] / (1 - args.beta2**count)).sqrt() + args.eps
    return state[0] / (1 - args.beta1**count) / (below if below.dim() == 2 else below[:, None])


def _adam(weight: torch.Tensor, grad: torch.Tensor, state: State, rate: float, args: Any, count: int) -> torch.Tensor:
    return weight - rate * (_moments(grad, state, args, count) + args.weight_decay * weight)


def _lamb(weight: torch.Tensor, grad: torch.Tensor, state: State, rate: float, args: Any, count: int) -> torch.Tensor:
    direction = _moments(grad, state, args, count) + args.weight_decay * weight
    ratio = weight.norm(dim=1, keepdim=True) / direction.norm(dim=1, keepdim=True)
    return weight - rate * torch.nan_to_num(ratio, 0, 0, 0) * direction


def _lars(weight: torch.Tensor, grad: torch.Tensor, state: State, rate: float, args: Any, _: Any) -> torch.Tensor:
    size, slope = weight.norm(dim=1, keepdim=True), grad.norm(dim=1, keepdim=True)
    of_row = rate * args.eta * torch.nan_to_num(size / (slope + args.weight_decay * size), 0, 0, 0)
    state[0] = args.momentum * state[0] + of_row * (grad + args.weight_decay * weight)
    return weight - state[0]


def _adagrad(weight: torch.Tensor, grad: torch.Tensor, state: State, rate: float, args: Any, _: Any) -> torch.Tensor:
    if args.weight_decay_mode == L2:
        grad = grad + args.weight_decay * weight
    state[0] = state[0] + grad.square().mean(1)
    kept = 1 - rate * args.weight_decay if args.weight_decay_mode == DECOUPLE else 1.0
    return kept * weight - rate * grad / (state[0].sqrt() + args.eps)[:, None]


UPDATES: dict[str, Callable[..., torch.Tensor]] = {
    "rowwise_adagrad": _adagrad,
    "adam": _adam,
    "partial_rowwise_adam": _adam,
    "lamb": _lamb,
    "partial_rowwise_lamb": _lamb,
    "lars_sgd": _lars,
}
