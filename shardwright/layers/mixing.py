"""Interaction modules of a hierarchical ensemble: from M embeddings to L, or to one flat vector.

A builder (num_in, dim, num_out) -> Module((B, M, D) -> (B, L, D) or (B, H)) builds a module; users may pass their own
builders. `build_interaction` projects a flat vector to L embeddings. INTERACTIONS has the five modules of Zhang et
al., "DHEN: A Deep and Hierarchical Ensemble Network for Large-Scale Click-Through Rate Prediction" (2022), DCN v2, and
the factorization machine of Zhang et al., "Wukong: Towards a Scaling Law for Large-Scale Recommendation" (2024).

Shape legend: B samples, M input embeddings, L output embeddings, D columns, H width of a flat vector, K mixtures.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.layers.attention import TransformerBlock
from shardwright.layers.interaction import Cross, CrossV2, DotInteraction
from shardwright.layers.mlp import MLP

InteractionBuilder = Callable[[int, int, int], nn.Module]


class Mix(nn.Module):
    """W X, linear combinations of the embeddings: (B, M, D) -> (B, L, D)."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weights = nn.Linear(num_in, num_out, bias=False)

    def forward(self, x_BMD: Tensor) -> Tensor:
        return self.weights(x_BMD.mT).mT


class Projection(nn.Module):
    """reshape(W v): (B, H) -> (B, L, D)."""

    def __init__(self, width: int, num_out: int, dim: int) -> None:
        super().__init__()
        self.num_out = num_out
        self.weights = nn.Linear(width, num_out * dim, bias=False)

    def forward(self, v_BH: Tensor) -> Tensor:
        return self.weights(v_BH).unflatten(1, (self.num_out, -1))


class Convolution(nn.Module):
    """2-D convolution over the M x D matrix, padded to keep its size: (B, M, D) -> (B, channels * M, D)."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        if size % 2 == 0:
            raise UserError(f"a convolution of size {size} would shift the embeddings; wanted an odd size")
        self.conv = nn.Conv2d(1, channels, size, padding=size // 2)

    def forward(self, x_BMD: Tensor) -> Tensor:
        conv, image_B1MD = self.conv, x_BMD.unsqueeze(1)
        if x_BMD.device.type == "cpu" and x_BMD.dtype == conv.weight.dtype:  # oneDNN is slow with a single channel
            size, padding = list(conv.kernel_size), list(conv.padding)
            conv2d = torch.ops.aten.thnn_conv2d.default
            return conv2d(image_B1MD, conv.weight, size, conv.bias, [1, 1], padding).flatten(1, 2)
        return conv(image_B1MD).flatten(1, 2)


class CrossStack(nn.Module):
    """Stacked crosses, without skips, over the flattened embeddings: (B, M, D) -> (B, M * D)."""

    def __init__(self, crosses: Iterable[nn.Module]) -> None:
        super().__init__()
        self.crosses = nn.ModuleList(crosses)

    def forward(self, x_BMD: Tensor) -> Tensor:
        first_BH = x_BH = x_BMD.flatten(1)
        for cross in self.crosses:
            x_BH = cross(first_BH, x_BH)
        return x_BH


class MixtureDots(nn.Module):
    """X (X^T Y): dots of all embeddings with K learned mixtures Y, then an MLP: (B, M, D) -> (B, H).

    It computes M * K dots; all pairs would take M^2.
    """

    def __init__(self, num_in: int, mixtures: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.mix = Mix(num_in, mixtures)
        self.norm = nn.LayerNorm(num_in * mixtures)
        self.deep = MLP(num_in * mixtures, hidden)

    def forward(self, x_BMD: Tensor) -> Tensor:
        return self.deep(self.norm((x_BMD @ self.mix(x_BMD).mT).flatten(1)))


def dlrm(num_in: int, dim: int, num_out: int, *, hidden: Sequence[int] = (64,)) -> nn.Module:
    """AdvancedDLRM: dot products of all pairs, then an MLP."""
    dots = DotInteraction(num_in)
    return nn.Sequential(dots, MLP(dots.out_features, hidden))


def attention(num_in: int, dim: int, num_out: int, *, num_heads: int = 2, widen: int = 4) -> nn.Module:
    """A transformer encoder layer, then a linear combination of its embeddings."""
    return nn.Sequential(TransformerBlock(dim, num_heads, causal=False, widen=widen), Mix(num_in, num_out))


def convolution(num_in: int, dim: int, num_out: int, *, channels: int = 1, size: int = 3) -> nn.Module:
    return nn.Sequential(Convolution(channels, size), Mix(channels * num_in, num_out))


def linear(num_in: int, dim: int, num_out: int) -> nn.Module:
    return Mix(num_in, num_out)


def dcn(num_in: int, dim: int, num_out: int, *, num_cross: int = 2) -> nn.Module:
    """x_(n+1) = x_0 (x_n . w) + b."""
    return CrossStack(Cross(num_in * dim, skip=False) for _ in range(num_cross))


def dcn_v2(num_in: int, dim: int, num_out: int, *, num_cross: int = 1, rank: int = 16) -> nn.Module:
    """x_(n+1) = x_0 * (V U x_n + b), elementwise over all embeddings; then a linear combination of them."""
    crosses = CrossStack(CrossV2(num_in * dim, rank=rank, skip=False) for _ in range(num_cross))
    return nn.Sequential(crosses, nn.Unflatten(1, (num_in, dim)), Mix(num_in, num_out))


def fm(num_in: int, dim: int, num_out: int, *, mixtures: int = 4, hidden: Sequence[int] = (64,)) -> nn.Module:
    return MixtureDots(num_in, mixtures, hidden)


INTERACTIONS: MappingProxyType[str, InteractionBuilder] = MappingProxyType(
    {
        "dlrm": dlrm,
        "attention": attention,
        "convolution": convolution,
        "linear": linear,
        "dcn": dcn,
        "dcn_v2": dcn_v2,
        "fm": fm,
    }
)


def build_interaction(builder: InteractionBuilder, num_in: int, dim: int, num_out: int) -> nn.Module:
    """Build the module; add a projection if it outputs a flat vector; any other shape is an error."""
    name = getattr(getattr(builder, "func", builder), "__name__", repr(builder))
    module = builder(num_in, dim, num_out)
    if not isinstance(module, nn.Module):
        raise UserError(f'module "{name}": its builder returned a {type(module).__name__}; wanted a torch module')
    shape = _infer_output_shape(name, module, num_in, dim)
    if shape == (2, num_out, dim):
        return module
    if len(shape) == 2 and shape[0] == 2:
        return nn.Sequential(module, Projection(shape[1], num_out, dim))
    actual = f"({', '.join(['B' if size == 2 and not axis else str(size) for axis, size in enumerate(shape)])})"
    raise UserError(
        f'module "{name}" outputs {actual} for (B, {num_in}, {dim}); wanted (B, {num_out}, {dim}), or (B, any), '
        "which is then projected"
    )


def _infer_output_shape(name: str, module: nn.Module, num_in: int, dim: int) -> tuple[int, ...]:
    """Run two samples through a copy on the meta device; return the output shape."""
    meta_module = copy.deepcopy(module).to("meta")
    dtype = next((tensor.dtype for tensor in meta_module.parameters()), torch.get_default_dtype())
    try:
        with torch.no_grad():
            return tuple(meta_module(torch.empty(2, num_in, dim, dtype=dtype, device="meta")).shape)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        raise UserError(f'module "{name}" fails on (B, {num_in}, {dim}): {str(error).splitlines()[0]}') from error
