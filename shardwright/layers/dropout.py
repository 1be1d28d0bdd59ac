"""Dropout whose numbers a job keys: ranks draw different ones, and a repeated forward pass the same."""

from torch import Tensor, nn

from shardwright.layers.draws import LayerDraws


class Dropout(nn.Module):
    """Sets a share `p` of the numbers to 0 in training, and scales the others. Called once in a forward pass."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.draws = p, LayerDraws()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        is_kept = (self.draws.uniform(x.numel()) >= self.p).view(x.shape).to(x.device)
        return x * is_kept / (1 - self.p)
