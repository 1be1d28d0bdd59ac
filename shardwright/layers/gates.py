"""Gates of a mixture of experts: choose the experts of each token.

Shape legend: T tokens, C channels, E experts, K experts per token.
"""

from typing import NamedTuple

from torch import Tensor, nn

from shardwright.errors import UserError


class Routing(NamedTuple):
    """The experts of each token, highest score first, and their weights, which sum to 1 per token."""

    experts_TK: Tensor
    weights_TK: Tensor


class TopKGate(nn.Module):
    """The K experts with the highest scores, with softmax weights; of equal scores, the lower index wins."""

    def __init__(self, channels: int, num_experts: int, num_chosen: int) -> None:
        super().__init__()
        if not 1 <= num_chosen <= num_experts:
            raise UserError(f"a gate that chooses {num_chosen} of {num_experts} experts; wanted 1 to {num_experts}")
        self.num_chosen = num_chosen
        self.scores = nn.Linear(channels, num_experts, bias=False)

    def forward(self, x_TC: Tensor) -> Routing:
        scores_TE, order_TE = self.scores(x_TC).sort(dim=1, descending=True, stable=True)
        return Routing(order_TE[:, : self.num_chosen], scores_TE[:, : self.num_chosen].softmax(1))
