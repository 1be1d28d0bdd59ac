"""Embedding bags in plain torch: the slow reference that every fast kernel is tested against.

Works in any float dtype, float64 included, on any device. The gradient of a row is summed in the order of its lookups,
so results do not depend on threads. Nothing here has the size of a table except the table and its optimizer's state.

Shape legend: E rows of a table, D columns, N ids (of Adam: numbers of a parameter), B bags, U distinct rows.
"""

from collections.abc import Generator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from shardwright.kernels.arguments import POOLINGS, IdOutOfRange, Ids, TableState, vector_dtype
from shardwright.kernels.rounding import random_bits, row_keys, stochastic_round, stochastic_round_bf16
from shardwright.spec.optimizer import (
    LAMB,
    SGD,
    AdaGrad,
    Adam,
    PartialRowWiseAdam,
    RowWiseAdaGrad,
    SparseOptimizer,
    state_shapes,
)
from shardwright.spec.workload import Pooling

T = TypeVar("T")
RowSumGenerator = Generator[Tensor, Tensor, T]  # yields sums over the shard's columns, is sent sums over full rows


def bag_of_id(lengths_B: Tensor, num_ids: int) -> Tensor:
    """(N,) index of the bag that each id belongs to."""
    bags = torch.arange(lengths_B.numel(), device=lengths_B.device)
    return torch.repeat_interleave(bags, lengths_B, output_size=num_ids)


def lookup(weight_ED: Tensor, ids_N: Tensor, lengths_B: Tensor, weights_N: Tensor | None, pooling: Pooling) -> Tensor:
    """(B, D) pooled bags, or for pooling "none" the (N, D) rows themselves."""
    rows_ND = weight_ED[ids_N].to(vector_dtype(weight_ED.dtype))
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
    """(N, D) the gradient of each looked-up row, from the gradient of `lookup`'s result."""
    if pooling == "none":
        grad_ND = grad
    else:
        if pooling == "mean":
            grad = grad / lengths_B.clamp(min=1).unsqueeze(1)
        grad_ND = grad[bag_of_id(lengths_B, num_ids)]
    return grad_ND if weights_N is None else grad_ND * weights_N.unsqueeze(1).to(grad.dtype)


def id_weight_gradients(weight_ED: Tensor, ids_N: Tensor, grad: Tensor, lengths_B: Tensor, pooling: Pooling) -> Tensor:
    """(N,) the gradient of each id's weight."""
    rows_ND = weight_ED[ids_N].to(vector_dtype(weight_ED.dtype))
    return (rows_ND * id_gradients(grad, ids_N.numel(), lengths_B, None, pooling)).sum(1)


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
    key: int = 0,
    row_numbers: Tensor | None = None,
) -> None:
    """One optimizer step on the rows that have a gradient; `step` counts this table's updates from 1.

    The arithmetic is done in the gradient's dtype, which is also the state's. Weights of 16 bits are rounded
    stochastically, so that small steps are not lost; the random bits are a function of (key, step, row, column) alone.
    `row_numbers` as in TableState.
    """
    steps = update_column_shard(optimizer, weight_ED, state, gradient, (step, key, weight_ED.shape[1]), row_numbers)
    sums_U = next(steps, None)
    while sums_U is not None:
        try:
            sums_U = steps.send(sums_U)
        except StopIteration:
            return


def update_column_shard(
    optimizer: SparseOptimizer,
    weight_ED: Tensor,
    state: Mapping[str, Tensor],
    gradient: tuple[Tensor, Tensor],
    step_key_dim: tuple[int, int, int],
    row_numbers: Tensor | None = None,
) -> RowSumGenerator[None]:
    """`update` for some columns of a table, as a generator.

    It yields sums of squares over the shard's columns of each row and must be sent the sums over all columns.
    `step_key_dim` is (step, key, columns of the full table); `row_numbers` as in TableState.
    """
    step, key, dim = step_key_dim
    rows_U, grad_UD = gradient
    weight_UD = weight_ED[rows_U].to(grad_UD.dtype)
    grad_UD = yield from _clip_rows(optimizer, grad_UD)
    decay, lr = optimizer.weight_decay, optimizer.lr
    decayed_UD = weight_UD
    if not isinstance(optimizer, LAMB):
        if optimizer.decoupled:
            decayed_UD = weight_UD - lr * decay * weight_UD
        else:
            grad_UD = grad_UD + decay * weight_UD
    match optimizer:
        case SGD():
            change_UD = lr * _apply_momentum(optimizer, state, rows_U, grad_UD)
        case AdaGrad():
            sum_UD = _store_rows(state["sum"], rows_U, state["sum"][rows_U] + grad_UD**2)
            change_UD = lr * grad_UD / (sum_UD.sqrt() + optimizer.eps)
        case RowWiseAdaGrad():
            squares_U = yield (grad_UD**2).sum(1)
            sum_U = _store_rows(state["sum"], rows_U, state["sum"][rows_U] + squares_U / dim)
            change_UD = (lr / (sum_U.sqrt() + optimizer.eps)).unsqueeze(1) * grad_UD
        case Adam():
            change_UD = lr * _adam_direction(optimizer, state, rows_U, grad_UD, step)
        case PartialRowWiseAdam():
            squares_U = yield (grad_UD**2).sum(1)
            change_UD = lr * _partial_adam_direction(optimizer, state, rows_U, (grad_UD, squares_U / dim), step)
        case LAMB():
            change_UD = yield from _lamb_change(optimizer, weight_UD, state, rows_U, grad_UD, step)
    keys_U = row_keys(key, step, rows_U if row_numbers is None else row_numbers[rows_U])
    weight_ED[rows_U] = stochastic_round(decayed_UD - change_UD, weight_ED.dtype, keys_U)


def num_row_sums(optimizer: SparseOptimizer) -> int:
    """How many sums over full rows `update_column_shard` yields."""
    num_sums = {"rowwise_adagrad": 1, "partial_rowwise_adam": 1, "lamb": 2}.get(optimizer.kind, 0)
    return num_sums + bool(optimizer.clip)


def _store_rows(state: Tensor, rows_U: Tensor, value: Tensor) -> Tensor:
    """Write the new state of rows and return it."""
    state[rows_U] = value
    return value


def _clip_rows(opt: SparseOptimizer, grad_UD: Tensor) -> RowSumGenerator[Tensor]:
    """Clip each row's gradient by its norm over the full row."""
    if not opt.clip:
        return grad_UD
    squares_U = yield (grad_UD**2).sum(1)
    norm_U = squares_U.sqrt()
    return torch.where(norm_U > opt.clip, opt.clip / norm_U, torch.ones_like(norm_U)).unsqueeze(1) * grad_UD


def _apply_momentum(opt: SGD, state: Mapping[str, Tensor], rows_U: Tensor, grad_UD: Tensor) -> Tensor:
    if not opt.momentum:
        return grad_UD
    return _store_rows(state["momentum"], rows_U, opt.momentum * state["momentum"][rows_U] + grad_UD)


def _update_mean(
    opt: Adam | PartialRowWiseAdam | LAMB, state: Mapping[str, Tensor], rows_U: Tensor, grad: Tensor, step: int
):
    """Update the first moment and return it bias-corrected."""
    mean_UD = _store_rows(state["mean"], rows_U, opt.beta1 * state["mean"][rows_U] + (1 - opt.beta1) * grad)
    return mean_UD / (1 - opt.beta1**step)


def _adam_direction(
    opt: Adam | LAMB, state: Mapping[str, Tensor], rows_U: Tensor, grad_UD: Tensor, step: int
) -> Tensor:
    """Bias-corrected mean over root of bias-corrected square; rows without a gradient keep their moments."""
    mean_UD = _update_mean(opt, state, rows_U, grad_UD, step)
    square_UD = _store_rows(state["square"], rows_U, opt.beta2 * state["square"][rows_U] + (1 - opt.beta2) * grad_UD**2)
    return mean_UD / ((square_UD / (1 - opt.beta2**step)).sqrt() + opt.eps)


def _partial_adam_direction(
    opt: PartialRowWiseAdam, state: Mapping[str, Tensor], rows_U: Tensor, grad: tuple[Tensor, Tensor], step: int
) -> Tensor:
    """`_adam_direction` with a second moment per row; `grad`: gradient, its mean square over full rows."""
    mean_UD = _update_mean(opt, state, rows_U, grad[0], step)
    square_U = _store_rows(state["square"], rows_U, opt.beta2 * state["square"][rows_U] + (1 - opt.beta2) * grad[1])
    return mean_UD / ((square_U / (1 - opt.beta2**step)).sqrt() + opt.eps).unsqueeze(1)


def _lamb_change(
    opt: LAMB, weight_UD: Tensor, state: Mapping[str, Tensor], rows_U: Tensor, grad_UD: Tensor, step: int
) -> RowSumGenerator[Tensor]:
    """Adam's direction with decoupled decay, scaled row by row to the norm of the weights' row."""
    direction_UD = _adam_direction(opt, state, rows_U, grad_UD, step) + opt.weight_decay * weight_UD
    weight_U = (yield (weight_UD**2).sum(1)).sqrt()
    direction_U = (yield (direction_UD**2).sum(1)).sqrt()
    trust_U = torch.where((weight_U > 0) & (direction_U > 0), weight_U / direction_U, torch.ones_like(weight_U))
    return opt.lr * trust_U.unsqueeze(1) * direction_UD


class AdamCoefficients(NamedTuple):
    """Coefficients of an Adam step of dense parameters, with bias correction; in csrc/adam.h's order."""

    beta2: float
    one_minus_beta1: float  # 1 - beta1
    one_minus_beta2: float
    step_size: float  # lr / (1 - beta1**step)
    denominator_scale: float  # 1 / sqrt(1 - beta2**step)
    eps: float
    weight_decay: float  # added to the gradient, times the weight
    weight_scale: float  # multiplies the weight: 1 - lr * decay if decay is decoupled, else 1
    sign: float  # of the gradient: -1 to maximize


def adam_update(
    weight_N: Tensor,
    gradient_N: Tensor,
    moments: Sequence[Tensor],
    coefficients: AdamCoefficients,
    key_and_offset: tuple[int, int],
):
    """One Adam step in place; `moments` are the mean and the square.

    bfloat16 moments are rounded stochastically when stored; the step itself uses them unrounded. `key_and_offset`: the
    result of `step_key`, and the position of the first number.
    """
    mean_N, square_N = moments
    gradient_N = coefficients.sign * gradient_N
    if coefficients.weight_decay:
        gradient_N = gradient_N + coefficients.weight_decay * weight_N
    old_mean_N = mean_N.to(weight_N.dtype)
    m_N = old_mean_N + coefficients.one_minus_beta1 * (gradient_N - old_mean_N)
    v_N = coefficients.beta2 * square_N.to(weight_N.dtype) + coefficients.one_minus_beta2 * gradient_N * gradient_N
    root_N = v_N.double().sqrt().to(v_N.dtype)  # torch's float32 square root is not always correctly rounded
    change_N = coefficients.step_size * m_N / (root_N * coefficients.denominator_scale + coefficients.eps)
    weight_N.copy_(coefficients.weight_scale * weight_N - change_N)
    bits_N = random_bits(
        key_and_offset[0], torch.arange(key_and_offset[1], key_and_offset[1] + len(weight_N), device=weight_N.device)
    )
    for moment_N, new_N, bits in ((mean_N, m_N, bits_N & 0xFFFF), (square_N, v_N, bits_N >> 16)):
        moment_N.copy_(stochastic_round_bf16(new_N, bits) if moment_N.dtype == torch.bfloat16 else new_N)


def vectors_by_feature(vectors: Sequence[Tensor], ids: Ids, dims: Sequence[int]) -> list[Tensor]:
    """Views of each feature's vectors: column slices of the pooled tensor, or the unpooled tensors."""
    pooled, *sequences = vectors
    widths = [0 if POOLINGS[p] == "none" else dims[table] for table, p in zip(ids.tables, ids.pooling, strict=True)]
    columns, unpooled = accumulate(widths, initial=0), iter(sequences)
    return [
        pooled[:, start : start + width] if width else next(unpooled)
        for start, width in zip(columns, widths, strict=False)
    ]


def check_ids(weights: Sequence[Tensor], ids: Ids, is_bounded: Sequence[bool] = ()) -> None:
    """Raise IdOutOfRange for an id outside its table. `is_bounded`: by table, whether its ids are its rows."""
    for feature, ((values, _, _), table) in enumerate(zip(ids.split_by_feature(), ids.tables, strict=True)):
        if values.numel() and (not is_bounded or is_bounded[table]):
            low, high = (int(bound) for bound in torch.aminmax(values))
            if low < 0 or high >= weights[table].shape[0]:
                raise IdOutOfRange(feature, low if low < 0 else high)


def lookup_all(weights: Sequence[Tensor], ids: Ids, vectors: Sequence[Tensor]) -> None:
    """Look up all features into `vectors`, in place."""
    check_ids(weights, ids)
    views = vectors_by_feature(vectors, ids, [weight.shape[1] for weight in weights])
    for out, (values, lengths, id_weights), table, pooling in zip(
        views, ids.split_by_feature(), ids.tables, ids.pooling, strict=True
    ):
        out.copy_(lookup(weights[table], values, lengths, id_weights, POOLINGS[pooling]))


def update_all(tables: Sequence[TableState], ids: Ids, gradients: Sequence[Tensor], optimizer: SparseOptimizer) -> None:
    """One optimizer step of all trained tables, in place."""
    check_ids([table.weight for table in tables], ids)
    views = vectors_by_feature(gradients, ids, [table.weight.shape[1] for table in tables])
    lookups_by_table: list[list[tuple[Tensor, Tensor]]] = [[] for _ in tables]
    for grad, (values, lengths, id_weights), table, pooling in zip(
        views, ids.split_by_feature(), ids.tables, ids.pooling, strict=True
    ):
        gradient = id_gradients(grad, values.numel(), lengths, id_weights, POOLINGS[pooling])
        lookups_by_table[table].append((values, gradient))
    for table, pairs in zip(tables, lookups_by_table, strict=True):
        if table.is_trained and pairs:
            rows, gradient = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
            names = state_shapes(optimizer, *table.weight.shape)
            update(
                optimizer,
                table.weight,
                dict(zip(names, table.state, strict=True)),
                sum_by_row(rows, gradient),
                step=table.step,
                key=table.rounding_key,
                row_numbers=table.row_numbers,
            )


def id_weight_gradients_all(weights: Sequence[Tensor], ids: Ids, gradients: Sequence[Tensor], out: Tensor) -> None:
    """The gradient of each id's weight, into `out` (N,)."""
    check_ids(weights, ids)
    views = vectors_by_feature(gradients, ids, [weight.shape[1] for weight in weights])
    for grad, (values, lengths, _), (start, end), table, pooling in zip(
        views, ids.split_by_feature(), ids.feature_ranges(), ids.tables, ids.pooling, strict=True
    ):
        out[start:end] = id_weight_gradients(weights[table], values, grad, lengths, POOLINGS[pooling])
