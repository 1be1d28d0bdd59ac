"""Self-attention, causal or not, and the transformer block around it.

Shape legend: B samples, T positions, C channels, H heads, K channels of a head.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional


def local_keys_values(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values unchanged: the full sequence is on this device."""
    return key, value


class Attention(nn.Module):
    """Multi-head self-attention; for context parallelism set `gather` to all-gather keys and values."""

    def __init__(self, channels: int, num_heads: int, *, causal: bool = True) -> None:
        super().__init__()
        if channels % num_heads:
            raise ValueError(f"{channels} channels do not divide into {num_heads} heads")
        self.num_heads = num_heads
        self.causal = causal
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.gather: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = local_keys_values

    def forward(self, x_BTC: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x_BTC).chunk(3, dim=2)
        )
        key, value = self.gather(key, value)
        mixed_BHTK = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed_BHTK.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Pre-norm attention and an MLP with GELU and `widen` * C hidden channels, each with a residual."""

    def __init__(self, channels: int, num_heads: int, *, causal: bool = True, widen: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attention = Attention(channels, num_heads, causal=causal)
        self.norm2 = nn.LayerNorm(channels)
        self.widen = nn.Linear(channels, widen * channels)
        self.narrow = nn.Linear(widen * channels, channels)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC))
        return x_BTC + self.narrow(functional.gelu(self.widen(self.norm2(x_BTC))))
