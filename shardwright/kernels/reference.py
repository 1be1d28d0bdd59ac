"""Embedding bags in plain torch: the slow truth every fast kernel is held against.

Works in any float dtype, float64 included. The gradient of a row is summed in the order of its lookups, so results do
not depend on threads. Nothing here has the size of a table except the table and its optimizer's state.

Shape legend: E rows of a table, D columns, N ids, B bags, U distinct rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwright.spec.optimizer import LAMB, SGD, AdaGrad, Adam, RowWiseAdaGrad, SparseOptimizer
from shardwright.spec.workload import Pooling


def bag_of_id(lengths_B: Tensor, num_ids: int) -> Tensor:
    """(N,) the bag each id belongs to."""
    bags = torch.arange(lengths_B.numel(), device=lengths_B.device)
    return torch.repeat_interleave(bags, lengths_B, output_size=num_ids)


def lookup(weight_ED: Tensor, ids_N: Tensor, lengths_B: Tensor, weights_N: Tensor | None, pooling: Pooling) -> Tensor:
    """(B, D) pooled bags, or for pooling "none" the (N, D) rows themselves."""
    rows_ND = weight_ED[ids_N]
    if weights_N is not None:
        rows_ND = rows_ND * weights_N.unsqueeze(1).to(rows_ND.dtype)
    if pooling == "none":
        return rows_ND
    pooled_BD = rows_ND.new_zeros(lengths_B.numel(), weight_ED.shape[1])
    pooled_BD.index_add_(0, bag_of_id(lengths_B, ids_N.numel()), rows_ND)
    if pooling == "mean":
        pooled_BD /= lengths_B.clamp(min=1).unsqueeze(1)
    return pooled_BD


def id_gradients(grad: Tensor, num_ids: int, lengths_B: Tensor, weights_N: Tensor | None, pooling: Pooling) -> Tensor:
    """(N, D) the gradient that each looked-up row receives from the gradient of `lookup`'s result."""
    if pooling == "none":
        grad_ND = grad
    else:
        if pooling == "mean":
            grad = grad / lengths_B.clamp(min=1).unsqueeze(1)
        grad_ND = grad[bag_of_id(lengths_B, num_ids)]
    return grad_ND if weights_N is None else grad_ND * weights_N.unsqueeze(1).to(grad.dtype)


def weight_gradients(weight_ED: Tensor, ids_N: Tensor, grad: Tensor, lengths_B: Tensor, pooling: Pooling) -> Tensor:
    """(N,) the gradient of each id's weight."""
    return (weight_ED[ids_N] * id_gradients(grad, ids_N.numel(), lengths_B, None, pooling)).sum(1)


def sum_by_row(ids_N: Tensor, grad_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows (U,), ascending, and the sum of their gradients (U, D)."""
    rows_U, inverse_N = torch.unique(ids_N, return_inverse=True)
    grad_UD = grad_ND.new_zeros(rows_U.numel(), grad_ND.shape[1])
    return rows_U, grad_UD.index_add_(0, inverse_N, grad_ND)


def update(
    optimizer: SparseOptimizer,
    weight_ED: Tensor,
    state: Mapping[str, Tensor],
    gradient: tuple[Tensor, Tensor],
    *,
    step: int,
) -> None:
    """One optimizer step on the rows that have a gradient; `step` counts this table's updates from 1.

    The arithmetic is done in the gradient's dtype, which is that of the state.
    """
    rows_U, grad_UD = gradient
    weight_UD = weight_ED[rows_U].to(grad_UD.dtype)
    match optimizer:
        case SGD():
            change_UD = _sgd(optimizer, weight_UD, state, rows_U, grad_UD)
        case AdaGrad():
            change_UD = _adagrad(optimizer, weight_UD, state, rows_U, grad_UD)
        case RowWiseAdaGrad():
            change_UD = _rowwise_adagrad(optimizer, weight_UD, state, rows_U, grad_UD)
        case Adam():
            grad_UD = grad_UD + optimizer.weight_decay * weight_UD
            change_UD = optimizer.lr * _adam_direction(optimizer, state, rows_U, grad_UD, step)
        case LAMB():
            change_UD = _lamb(optimizer, weight_UD, state, rows_U, grad_UD, step)
    weight_ED[rows_U] = (weight_UD - change_UD).to(weight_ED.dtype)


def _sgd(opt: SGD, weight_UD: Tensor, state: Mapping[str, Tensor], rows_U: Tensor, grad_UD: Tensor) -> Tensor:
    grad_UD = grad_UD + opt.weight_decay * weight_UD
    if opt.momentum:
        grad_UD = opt.momentum * state["momentum"][rows_U] + grad_UD
        state["momentum"][rows_U] = grad_UD
    return opt.lr * grad_UD


def _adagrad(opt: AdaGrad, weight_UD: Tensor, state: Mapping[str, Tensor], rows_U: Tensor, grad_UD: Tensor) -> Tensor:
    grad_UD = grad_UD + opt.weight_decay * weight_UD
    sum_UD = state["sum"][rows_U] + grad_UD**2
    state["sum"][rows_U] = sum_UD
    return opt.lr * grad_UD / (sum_UD.sqrt() + opt.eps)


def _rowwise_adagrad(
    opt: RowWiseAdaGrad, weight_UD: Tensor, state: Mapping[str, Tensor], rows_U: Tensor, grad_UD: Tensor
) -> Tensor:
    grad_UD = grad_UD + opt.weight_decay * weight_UD
    sum_U = state["sum"][rows_U] + (grad_UD**2).mean(1)
    state["sum"][rows_U] = sum_U
    return opt.lr * grad_UD / (sum_U.sqrt() + opt.eps).unsqueeze(1)


def _adam_direction(
    opt: Adam | LAMB, state: Mapping[str, Tensor], rows_U: Tensor, grad_UD: Tensor, step: int
) -> Tensor:
    """Bias-corrected mean over root of bias-corrected square; rows without a gradient keep their moments."""
    mean_UD = opt.beta1 * state["mean"][rows_U] + (1 - opt.beta1) * grad_UD
    square_UD = opt.beta2 * state["square"][rows_U] + (1 - opt.beta2) * grad_UD**2
    state["mean"][rows_U] = mean_UD
    state["square"][rows_U] = square_UD
    root_UD = (square_UD / (1 - opt.beta2**step)).sqrt()
    return mean_UD / (1 - opt.beta1**step) / (root_UD + opt.eps)


def _lamb(
    opt: LAMB, weight_UD: Tensor, state: Mapping[str, Tensor], rows_U: Tensor, grad_UD: Tensor, step: int
) -> Tensor:
    """Adam's direction with decoupled decay, scaled row by row to the length of the row."""
    direction_UD = _adam_direction(opt, state, rows_U, grad_UD, step) + opt.weight_decay * weight_UD
    weight_U = weight_UD.norm(dim=1)
    direction_U = direction_UD.norm(dim=1)
    trust_U = torch.where((weight_U > 0) & (direction_U > 0), weight_U / direction_U, torch.ones_like(weight_U))
    return opt.lr * trust_U.unsqueeze(1) * direction_UD
