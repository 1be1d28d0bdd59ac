"""Attention of a target over its history, on jagged rows without padding.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (2018).

Shape legend: B samples, N rows of all histories, D columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.layers.mlp import MLP


def repeat_by_length(x_BD: Tensor, lengths_B: Tensor, num: int) -> Tensor:
    """Each sample's row as often as its length; `num`: the sum of the lengths, which tensors on meta do not have."""
    return x_BD.repeat_interleave(lengths_B, dim=0, output_size=num)


def segment_sum(rows_ND: Tensor, lengths_B: Tensor) -> Tensor:
    """(B, D): the sum of each sample's rows, in their order; 0 without rows. No bit depends on other samples."""
    return torch.segment_reduce(rows_ND, "sum", lengths=lengths_B, unsafe=True, initial=0)


def segment_softmax(scores_N: Tensor, lengths_B: Tensor) -> Tensor:
    """The softmax over each sample's rows."""
    num = scores_N.shape[0]
    largest_B = torch.segment_reduce(scores_N.detach(), "max", lengths=lengths_B, unsafe=True, initial=-torch.inf)
    exp_N1 = (scores_N - repeat_by_length(largest_B, lengths_B, num)).exp().unsqueeze(1)
    return (exp_N1 / repeat_by_length(segment_sum(exp_N1, lengths_B), lengths_B, num)).squeeze(1)


class TargetAttention(nn.Module):
    """Weights of an MLP on [key, target, key * target, key - target], and the sum of the keys by weight: (B, D).

    The weights are the raw scores as in the paper, so that their sum tells how much of the history is like the target;
    with `normalize`, their softmax over the history. A sample without history gets zeros.
    """

    def __init__(self, dim: int, hidden: Sequence[int], *, normalize: bool = False) -> None:
        super().__init__()
        self.normalize = normalize
        self.score = MLP(4 * dim, (*hidden, 1), activate_last=False)

    def forward(self, target_BD: Tensor, keys_ND: Tensor, lengths_B: Tensor) -> Tensor:
        target_ND = repeat_by_length(target_BD, lengths_B, keys_ND.shape[0])
        pairs = torch.cat([keys_ND, target_ND, keys_ND * target_ND, keys_ND - target_ND], dim=1)
        weights_N = self.score(pairs).squeeze(1)
        if self.normalize:
            weights_N = segment_softmax(weights_N, lengths_B)
        return segment_sum(weights_N.unsqueeze(1) * keys_ND, lengths_B)
