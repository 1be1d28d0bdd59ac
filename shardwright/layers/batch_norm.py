"""Batch normalization over all samples of a batch, on whichever ranks they are.

A rank all-gathers the count, mean and sum of squares of every rank's samples in the forward pass, and all-reduces two
sums per column in the backward pass, so the result is that of one process with the whole batch (batches of a step are
normalized one by one). Evaluation uses running statistics, as torch's layer does.

Shape legend: B samples of the local batch, C columns, R ranks.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class SampleRanks(Protocol):
    """Interface of the ranks among which a batch is split."""

    def all_gather(self, x: Tensor) -> Tensor:
        """(...) -> (R, ...)"""
        ...

    def all_reduce(self, x: Tensor) -> Tensor: ...


class OneRank:
    """All samples are in this process."""

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


class BatchNorm(nn.Module):
    """(B, C) -> (B, C); its parameters and buffers have the names of nn.BatchNorm1d, without num_batches_tracked."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.ranks: SampleRanks = OneRank()
        self.weight = nn.Parameter(torch.empty(num_features))
        self.bias = nn.Parameter(torch.empty(num_features))
        self.register_buffer("running_mean", torch.empty(num_features))
        self.register_buffer("running_var", torch.empty(num_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for tensor, value in ((self.weight, 1), (self.bias, 0), (self.running_mean, 0), (self.running_var, 1)):
            nn.init.constant_(tensor, value)

    def forward(self, x_BC: Tensor, is_counted_B: Tensor | None = None) -> Tensor:
        """`is_counted_B`: the samples whose mean and variance normalize all samples in training; None: all."""
        if not self.training:
            scale_C = self.weight * torch.rsqrt(self.running_var + self.eps)
            return x_BC * scale_C + (self.bias - self.running_mean * scale_C)
        x_BC = x_BC.float() if x_BC.dtype in (torch.bfloat16, torch.float16) else x_BC
        out_BC, mean_C, var_C, num = _Normalize.apply(x_BC, self.weight, self.bias, is_counted_B, self.eps, self.ranks)
        with torch.no_grad():
            unbiased_C = var_C * (num / (num - 1).clamp(min=1))
            for running_C, own_C in ((self.running_mean, mean_C), (self.running_var, unbiased_C)):
                own_C = own_C.to(running_C.dtype).where(num > 0, running_C)  # a batch may have no counted sample
                running_C.lerp_(own_C, self.momentum)
        return out_BC

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}, momentum={self.momentum}"


class _Normalize(torch.autograd.Function):
    """Forward: normalized samples, and mean, biased variance and number of all ranks' counted samples."""

    @staticmethod
    def forward(ctx: Any, x_BC: Tensor, weight_C: Tensor, bias_C: Tensor, *options: Any) -> Any:
        is_counted_B, eps, ranks = options
        if is_counted_B is None:
            count_1 = x_BC.new_full((1,), float(len(x_BC)))
        else:
            count_1 = is_counted_B.sum().to(x_BC.dtype).view(1)
        mean_C = _zero_uncounted(x_BC, is_counted_B).sum(0) / count_1.clamp(min=1)
        squares_C = (_zero_uncounted(x_BC - mean_C, is_counted_B) ** 2).sum(0)
        counts_R1, means_RC, squares_RC = ranks.all_gather(torch.cat([count_1, mean_C, squares_C])).split(
            [1, len(mean_C), len(mean_C)], dim=1
        )
        num = counts_R1.sum()
        mean_C = (means_RC * counts_R1).sum(0) / num.clamp(min=1)
        var_C = (squares_RC + counts_R1 * (means_RC - mean_C) ** 2).sum(0) / num.clamp(min=1)
        inverse_C = torch.rsqrt(var_C + eps)
        normal_BC = (x_BC - mean_C) * inverse_C
        ctx.save_for_backward(normal_BC, inverse_C, weight_C, num, is_counted_B)
        ctx.ranks = ranks
        ctx.mark_non_differentiable(mean_C, var_C, num)
        return normal_BC * weight_C + bias_C, mean_C, var_C, num

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient_BC = gradients[0]
        normal_BC, inverse_C, weight_C, num, is_counted_B = ctx.saved_tensors
        bias_gradient_C, weight_gradient_C = gradient_BC.sum(0), (gradient_BC * normal_BC).sum(0)
        sums_2C = ctx.ranks.all_reduce(torch.stack([bias_gradient_C, weight_gradient_C]))
        mean_2C = sums_2C / num.clamp(min=1)
        of_statistics_BC = _zero_uncounted(mean_2C[0] + normal_BC * mean_2C[1], is_counted_B)
        x_gradient_BC = (gradient_BC - of_statistics_BC) * (inverse_C * weight_C)
        return x_gradient_BC, weight_gradient_C, bias_gradient_C, None, None, None


def _zero_uncounted(x_BC: Tensor, is_counted_B: Tensor | None) -> Tensor:
    """The rows of the samples that count, and zeros in place of the others."""
    return x_BC if is_counted_B is None else x_BC.masked_fill(~is_counted_B.unsqueeze(1), 0)
