"""The block of decoder-only transformers: grouped-query attention, and an MLP or experts, in usual forms.

Shape legend: B samples, T positions, C channels, H heads, G heads of keys and values, K channels of a head.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import UserError
from shardwright.layers.gates import TopKGate
from shardwright.layers.moe import EXPERTS, MoE

NORMS = MappingProxyType({"layer": nn.LayerNorm, "rms": nn.RMSNorm})


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """The experts of each block. Fields from `over_chosen` on are of `TopKGate` (layers/gates.py).

    `hidden`: channels inside an expert. `shared`: channels inside the shared expert, applied to every token; 0: none.
    """

    num_experts: int
    num_chosen: int
    hidden: int
    shared: int = 0
    over_chosen: bool = True
    capacity: float = 0.0
    balance: float = 0.0
    z: float = 0.0
    groups: int = 1
    random_second: bool = False


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """What distinguishes the families of decoder-only transformers.

    `rotary_base` of 0: positions are learned embeddings. `biases`: which linear layers have a bias. `qk_norm`: queries
    and keys of each head are normalized. `tied`: the head has the token embedding's weight. `head_width`: channels of
    an attention head; 0: the model's channels divided by the heads. `experts`: in place of the MLP.
    """

    norm: Literal["layer", "rms"] = "rms"
    norm_eps: float = 1e-5
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    rotary_base: float = 10_000.0
    biases: Literal["all", "attention", "qkv", "none"] = "none"
    qk_norm: bool = False
    tied: bool = False
    head_width: int = 0
    experts: ExpertForm | None = None


GPT2 = DecoderForm("layer", 1e-5, "gelu", 0.0, "all", tied=True)
LLAMA = DecoderForm()
QWEN2 = DecoderForm(norm_eps=1e-6, rotary_base=1_000_000.0, biases="qkv")
QWEN3 = DecoderForm(norm_eps=1e-6, rotary_base=1_000_000.0, qk_norm=True)


class DecoderAttention(nn.Module):
    """Causal self-attention in which several query heads share a head of keys and values."""

    def __init__(self, channels: int, num_heads: int, num_kv_heads: int = 0, form: DecoderForm = LLAMA) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        if (channels % num_heads and not form.head_width) or num_heads % num_kv_heads:
            raise UserError(
                f"{channels} channels, {num_heads} heads and {num_kv_heads} heads of keys and values: "
                "each number must be a multiple of the next"
            )
        width = form.head_width or channels // num_heads
        if form.rotary_base and width % 2:
            raise UserError(f"rotary positions need an even number of channels a head, not {width}")
        self.width = width
        self.rotary_base = form.rotary_base
        has_bias = form.biases != "none"
        self.query = nn.Linear(channels, num_heads * width, bias=has_bias)
        self.key = nn.Linear(channels, num_kv_heads * width, bias=has_bias)
        self.value = nn.Linear(channels, num_kv_heads * width, bias=has_bias)
        self.out = nn.Linear(num_heads * width, channels, bias=form.biases in ("all", "attention"))
        norm = NORMS[form.norm]
        self.query_norm = norm(width, eps=form.norm_eps) if form.qk_norm else nn.Identity()
        self.key_norm = norm(width, eps=form.norm_eps) if form.qk_norm else nn.Identity()

    def forward(self, x_BTC: Tensor) -> Tensor:
        value_BGTK = self._split_heads(self.value(x_BTC)).transpose(1, 2)
        key_BGTK = self._rotate(self.key_norm(self._split_heads(self.key(x_BTC)))).transpose(1, 2)
        query_BHTK = self._rotate(self.query_norm(self._split_heads(self.query(x_BTC)))).transpose(1, 2)
        mixed_BHTK = functional.scaled_dot_product_attention(
            query_BHTK, key_BGTK, value_BGTK, is_causal=True, enable_gqa=query_BHTK.shape[1] != key_BGTK.shape[1]
        )
        return self.out(mixed_BHTK.transpose(1, 2).flatten(2))

    def _split_heads(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(2, (-1, self.width))

    def _rotate(self, x_BTHK: Tensor) -> Tensor:
        """Rotate pairs of channels by angles proportional to the position; channel k pairs with k + K/2."""
        if not self.rotary_base:
            return x_BTHK
        cos_TK, sin_TK = rotations(x_BTHK.shape[1], self.width, self.rotary_base, x_BTHK)
        low, high = x_BTHK.chunk(2, dim=3)
        return x_BTHK * cos_TK.unsqueeze(1) + torch.cat([-high, low], dim=3) * sin_TK.unsqueeze(1)


def rotations(num_positions: int, width: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """(T, K) cosines and sines of the angles of each position; pair k turns by 1 / base ** (2k / K) per position."""
    exact = torch.float64 if like.dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, width, 2, device=like.device, dtype=exact) / width
    positions = torch.arange(num_positions, device=like.device, dtype=exact)
    angles = torch.outer(positions, base**-exponents).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Gelu(nn.Module):
    """An MLP with one hidden layer."""

    def __init__(self, channels: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(channels, hidden, bias=bias)
        self.down = nn.Linear(hidden, channels, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x_BTC)))


class SwiGlu(nn.Module):
    """An MLP whose hidden layer is multiplied by a gate."""

    def __init__(self, channels: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(channels, hidden, bias=bias)
        self.up = nn.Linear(channels, hidden, bias=bias)
        self.down = nn.Linear(hidden, channels, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x_BTC)) * self.up(x_BTC))


MLPS = MappingProxyType({"gelu": Gelu, "swiglu": SwiGlu})


def make_experts(channels: int, form: DecoderForm, experts: ExpertForm) -> MoE:
    gate = TopKGate(
        channels,
        experts.num_experts,
        experts.num_chosen,
        over_chosen=experts.over_chosen,
        capacity=experts.capacity,
        balance=experts.balance,
        z=experts.z,
        groups=experts.groups,
    )
    if experts.random_second:
        gate = gate.with_random_second()
    bias = form.biases == "all"
    shared = MLPS[form.mlp](channels, experts.shared, bias=bias) if experts.shared else None
    return MoE(gate, EXPERTS[form.mlp](experts.num_experts, channels, experts.hidden, bias=bias), shared)


class DecoderBlock(nn.Module):
    """Attention and an MLP with `hidden` channels, each after a norm and with a residual.

    With experts in place of the MLP, the output is a pair: x, and the sum of the penalties of this and earlier blocks.
    """

    def __init__(
        self, channels: int, num_heads: int, num_kv_heads: int = 0, hidden: int = 0, form: DecoderForm = LLAMA
    ) -> None:
        super().__init__()
        norm = NORMS[form.norm]
        self.norm1 = norm(channels, eps=form.norm_eps)
        self.attention = DecoderAttention(channels, num_heads, num_kv_heads, form)
        self.norm2 = norm(channels, eps=form.norm_eps)
        self.mlp = (
            MLPS[form.mlp](channels, hidden or 4 * channels, bias=form.biases == "all")
            if form.experts is None
            else make_experts(channels, form, form.experts)
        )

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        x_BTC, earlier_B = x if isinstance(x, tuple) else (x, None)
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC))
        out = self.mlp(self.norm2(x_BTC))
        if isinstance(out, tuple):
            out, penalty_B = out
            earlier_B = penalty_B if earlier_B is None else earlier_B + penalty_B
        return x_BTC + out if earlier_B is None else (x_BTC + out, earlier_B)
