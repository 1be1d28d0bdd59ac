"""HSTU-like layers over jagged sequences: pointwise causal attention, gated, without padding.

Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations"
(2024).

Shape legend: B sequences, N positions of all sequences, M positions with a target at the end of each, C channels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.kernels.jagged_attention import jagged_attention


class SequenceLayer(nn.Module):
    """u, v, q, k = SiLU(linear(norm(x))); x + linear(norm(attention(q, k, v)) * u), with a bias by distance."""

    def __init__(self, channels: int, *, num_heads: int, head_dim: int, max_distance: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.norm = nn.LayerNorm(channels)
        self.expand = nn.Linear(channels, 4 * num_heads * head_dim)
        self.distance = DistanceBias(max_distance, num_heads)
        self.attended_norm = nn.LayerNorm(num_heads * head_dim)
        self.out = nn.Linear(num_heads * head_dim, channels)

    def forward(self, x_NC: Tensor, lengths_B: Tensor) -> Tensor:
        gate, *values = functional.silu(self.expand(self.norm(x_NC))).chunk(4, dim=1)
        value, query, key = (part.unflatten(1, (self.num_heads, self.head_dim)) for part in values)
        attended = jagged_attention(query, key, value, self.distance(), lengths_B).flatten(1)
        return x_NC + self.out(self.attended_norm(attended) * gate)


class DistanceBias(nn.Module):
    """A bias per head for each distance below `max_distance`; the last is that of all greater ones."""

    def __init__(self, max_distance: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_distance, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self) -> Tensor:
        return self.weight


def append_targets(keys_NC: Tensor, targets_BC: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """(M, C) sequences with their target as last position, and the positions of the targets (B,)."""
    num, samples = keys_NC.shape[0], lengths_B.shape[0]
    number_B = torch.arange(samples, device=lengths_B.device)
    target_places_B = lengths_B.cumsum(0) + number_B
    sample_N = number_B.repeat_interleave(lengths_B, output_size=num)
    key_places_N = torch.arange(num, device=lengths_B.device) + sample_N
    x_MC = keys_NC.new_zeros(num + samples, keys_NC.shape[1])
    return x_MC.index_copy(0, key_places_N, keys_NC).index_copy(0, target_places_B, targets_BC), target_places_B
