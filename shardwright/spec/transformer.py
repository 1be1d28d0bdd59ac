"""A transformer by its sizes: what planning needs of a model of layers that need not be built."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwright.errors import UserError, did_you_mean
from shardwright.spec import files
from shardwright.spec.checks import check_non_negative, check_positive, raise_if_any

FOLDER = Path(__file__).parents[1] / "transformers"


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Layers whose MLP is a mixture of experts. `shared`: experts that every token goes to. `dense_layers`: the first
    layers of the model, which have one MLP."""

    num: int
    chosen: int  # of a token
    intermediate: int  # of an expert
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values from low-rank projections."""

    query_rank: int  # 0: queries are projected directly
    key_value_rank: int
    rotary_channels: int  # of a head, rotated; the keys of all heads share them
    value_channels: int  # of a head


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder of equal layers. `gated`: the MLP has a gate (SwiGLU), so three matrices in place of two. `tied`: the
    head shares the weights of the input embedding."""

    version: Literal[1]
    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int
    head_channels: int  # of a head of queries and keys
    gated: bool = True
    tied: bool = False
    experts: ExpertLayers | None = None
    latent: LatentAttention | None = None

    @property
    def query_width(self) -> int:
        return self.heads * self.head_channels

    @property
    def key_value_width(self) -> int:
        """Channels of the keys of a token; of its values as many."""
        return self.key_value_heads * self.head_channels

    @property
    def attention_parameters(self) -> int:
        """Weights of the matrix products of a layer's attention."""
        if self.latent is None:
            return self.hidden * (2 * self.query_width + 2 * self.key_value_width)
        latent = self.latent
        plain_channels = self.head_channels - latent.rotary_channels
        queries = latent.query_rank * (self.hidden + self.query_width) or self.hidden * self.query_width
        down = self.hidden * (latent.key_value_rank + latent.rotary_channels)
        up = latent.key_value_rank * self.heads * (plain_channels + latent.value_channels)
        return queries + down + up + self.heads * latent.value_channels * self.hidden

    def mlp_parameters(self, intermediate: int) -> int:
        return (3 if self.gated else 2) * self.hidden * intermediate

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense_layers

    def layer_kinds(self, layers: range) -> list[tuple[int, int]]:
        """A layer of each kind among `layers`, and how many are like it: without experts first."""
        first = min(max(self.experts.dense_layers if self.experts else layers.stop, layers.start), layers.stop)
        kinds = [(layers.start, first - layers.start), (first, layers.stop - first)]
        return [(layer, num) for layer, num in kinds if num]

    def layer_parameters(self, layer: int) -> int:
        """Weights of the matrix products of a layer, all experts included."""
        return self.attention_parameters + self._mlp_parameters(layer, self.experts.num if self.experts else 0)

    def used_parameters(self, layer: int) -> int:
        """Weights that a token is multiplied with in a layer."""
        return self.attention_parameters + self._mlp_parameters(layer, self.experts.chosen if self.experts else 0)

    def _mlp_parameters(self, layer: int, num_experts: int) -> int:
        if self.experts is None or not self.has_experts(layer):
            return self.mlp_parameters(self.intermediate)
        router = self.hidden * self.experts.num
        return router + (num_experts + self.experts.shared) * self.mlp_parameters(self.experts.intermediate)

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, without norms and biases."""
        return sum(map(self.layer_parameters, range(self.layers))) + (2 - self.tied) * self.embedding_parameters

    @property
    def matrix_parameters(self) -> int:
        """Weights that a token is multiplied with, the head included and the input embedding not."""
        return sum(map(self.used_parameters, range(self.layers))) + self.embedding_parameters

    @property
    def attention_width(self) -> int:
        """Channels of queries, or the mean of those of queries and values, over all layers."""
        if self.latent is None:
            return self.layers * self.query_width
        return self.layers * self.heads * (self.head_channels + self.latent.value_channels) // 2

    def verify(self) -> None:
        raise_if_any(self._errors())

    def _errors(self) -> Iterator[str]:
        subject = f'model "{self.name}"'
        yield from check_positive(
            subject,
            layers=self.layers,
            hidden=self.hidden,
            intermediate=self.intermediate,
            heads=self.heads,
            key_value_heads=self.key_value_heads,
            vocabulary=self.vocabulary,
            head_channels=self.head_channels,
        )
        if self.key_value_heads > 0 and self.heads % self.key_value_heads:
            yield f"{subject}: {self.heads} heads do not divide into {self.key_value_heads} groups of key-value heads"
        if self.experts is not None:
            yield from check_positive(
                f"{subject}, experts",
                num=self.experts.num,
                chosen=self.experts.chosen,
                intermediate=self.experts.intermediate,
            )
            yield from check_non_negative(
                f"{subject}, experts", shared=self.experts.shared, dense_layers=self.experts.dense_layers
            )
            if self.experts.chosen > self.experts.num:
                yield f"{subject}: a token goes to {self.experts.chosen} experts of {self.experts.num}"


def transformer_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_transformer(name: str) -> Transformer:
    """One of those that come with Shardwright."""
    path = FOLDER / f"{name}.toml"
    if not path.exists():
        raise UserError(f'no model "{name}"{did_you_mean(name, transformer_names())}; or give a config.json')
    model = files.read(Transformer, path)
    model.verify()
    return model
