"""Dropout whose numbers a job keys by sample: they depend neither on ranks nor on how often a block runs."""

import torch
from torch import Tensor, nn

from shardwright.layers.draws import LayerDraws


class Dropout(nn.Module):
    """Sets a share `p` of the numbers to 0 in training, and scales the others. Called once in a forward pass.

    The first dimension of its input is that of the batch's samples.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.draws = p, LayerDraws()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        if x.is_meta:
            return x * torch.ones_like(x) / (1 - self.p)
        is_kept = (self.draws.uniform_by_sample(len(x), x[:1].numel()) >= self.p).view(x.shape).to(x.device)
        return x * is_kept / (1 - self.p)
