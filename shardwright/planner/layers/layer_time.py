"""Seconds of a layer, and of the head, for one micro-batch on a rank: forward and backward apart, by kind of work.

Products are priced by their shapes, attention by its multiplications under the causal mask, other operations by the
bytes that they read and write, collectives by the links between the ranks (`Overheads`: what is not hidden of them).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from shardwright.planner.layers.activations import VALUE_BYTES
from shardwright.planner.layers.degrees import Degrees, SequenceBatch
from shardwright.planner.layers.memory import GRADIENT_BYTES, WEIGHT_BYTES, layer_weights
from shardwright.planner.layers.rank_groups import exchange_seconds, group_links, ring_seconds
from shardwright.planner.price import primitives
from shardwright.spec.cluster import ATTENTION_PASSES, Cluster
from shardwright.spec.transformer import Transformer

DTYPE = "bfloat16"
Work = Literal["products", "attention", "memory", "tensor", "context", "experts", "sharded weights"]
NORM_VALUES = 2 * 2 + 2 * 3  # of a token and channel: two norms read and write, two residual sums read twice and write
ACTIVATION_VALUES = 3  # of a channel of the MLP, with a gate: two are read, one is written


@dataclass(frozen=True, slots=True)
class Overheads:
    """`exposed`: share of the time of tensor and context parallel collectives that computation does not hide.
    `chunk_seconds`: of a chunk's forward and backward besides its layers. The defaults are fitted to Kuaishou's
    published configurations (benchmarks.layer_calibration). `hides_gradients`: collectives of gradients and weights
    overlap with the last backwards and the first forwards; else they follow the passes."""

    exposed: float = 0.495
    chunk_seconds: float = 0.000488
    hides_gradients: bool = False


@dataclass(frozen=True, slots=True)
class PassSeconds:
    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: "PassSeconds") -> "PassSeconds":
        return PassSeconds(self.forward + other.forward, self.backward + other.backward)

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def scale(self, factor: float) -> "PassSeconds":
        return PassSeconds(self.forward * factor, self.backward * factor)


class LayerProduct(NamedTuple):
    """`times` products of (m, k) by (k, n)."""

    m: float
    k: float
    n: float
    times: float = 1


@dataclass(frozen=True, slots=True)
class LayerTimer:
    """Prices the layers of a model that is split so, on a cluster."""

    model: Transformer
    batch: SequenceBatch
    degrees: Degrees
    cluster: Cluster
    overheads: Overheads = Overheads()
    priced: dict[Any, PassSeconds] = field(default_factory=dict[Any, PassSeconds])  # timers may share it

    def layer_seconds(self, layer: int) -> PassSeconds:
        """Of all work; equal layers are priced once."""
        d = self.degrees
        sharding = (d.zero, d.num_shards, d.replicas) if d.zero >= 2 else ()
        key = (
            *(self.model.has_experts(layer), d.tensor, d.sequence_parallel, d.context, d.expert, d.recompute),
            *(self.batch.micro_sequences, sharding),
        )
        if key not in self.priced:
            self.priced[key] = sum(self.layer(layer).values(), PassSeconds())
        return self.priced[key]

    @property
    def tokens(self) -> float:
        """Of a micro-batch, on a rank."""
        return self.batch.micro_sequences * self.batch.length / self.degrees.context

    def layer(self, layer: int) -> dict[Work, PassSeconds]:
        parts: dict[Work, PassSeconds] = {
            "products": self._products(
                layer_products(self.model, layer, self.tokens, self.degrees, self.batch.imbalance)
            ),
            "attention": self._attention(),
            "memory": self._memory(layer),
            "tensor": self._tensor_collectives(),
            "context": self._context_collectives(),
        }
        if self.model.has_experts(layer):
            parts["experts"] = self._expert_exchange()
        if self.degrees.recompute == "full":
            parts = {work: PassSeconds(own.forward, own.total) for work, own in parts.items()}
        if self.degrees.zero >= 2:
            sharded, own = self._sharded_weights(layer), sum(parts.values(), PassSeconds())
            parts["sharded weights"] = PassSeconds(
                max(0.0, sharded.forward - own.forward), max(0.0, sharded.backward - own.backward)
            )
        return parts

    def head(self) -> PassSeconds:
        """The products with the vocabulary, on the last pipeline rank."""
        width = self.model.vocabulary / self.degrees.tensor
        return self._products([LayerProduct(self.tokens, self.model.hidden, width)])

    def _products(self, products: list[LayerProduct]) -> PassSeconds:
        forward = backward = 0.0
        for m, k, n, times in products:
            forward += times * self._product(m, k, n)
            backward += times * (self._product(m, n, k) + self._product(k, m, n))  # of inputs, and of weights
        return PassSeconds(forward, backward)

    def _product(self, m: float, k: float, n: float) -> float:
        return primitives.matmul_cost(self.cluster.device, round(m), round(k), round(n), DTYPE).seconds

    def _attention(self) -> PassSeconds:
        model, length = self.model, self.batch.length
        value_channels = model.latent.value_channels if model.latent else model.head_channels
        channels = model.heads * (model.head_channels + value_channels) / self.degrees.tensor
        flops = self.batch.micro_sequences * length**2 * channels / self.degrees.context  # half of the matrix
        seconds = flops * primitives.find_price(self.cluster.device, "attention", DTYPE).seconds_per_flop
        return PassSeconds(seconds, (ATTENTION_PASSES - 1) * seconds)  # a fused kernel computes scores again

    def _memory(self, layer: int) -> PassSeconds:
        experts = self.model.experts if self.model.has_experts(layer) else None
        width = experts.intermediate * (experts.chosen + experts.shared) if experts else self.model.intermediate
        activation = width * (ACTIVATION_VALUES if self.model.gated else ACTIVATION_VALUES - 1)
        hidden = self.model.hidden * (1 if self.degrees.sequence_parallel else self.degrees.tensor)
        values = NORM_VALUES * hidden + activation
        rate = primitives.find_price(self.cluster.device, "matmul", DTYPE).seconds_per_byte
        again = 0.0  # recomputed in the backward
        if self.degrees.recompute == "memory-bound":
            again = 2 * 2 * hidden + activation
        forward, backward = (
            VALUE_BYTES * part * self.tokens / self.degrees.tensor * rate for part in (values, 2 * values + again)
        )
        return PassSeconds(forward, backward)

    def _tensor_collectives(self) -> PassSeconds:
        """Forward: two all-gathers and two reduce-scatters, or two all-reduces without sequence parallelism; backward
        the same, and with it two all-gathers for the gradients of weights."""
        links = group_links(self.cluster, self.degrees.tensor, 1, self.degrees.num_ranks // self.degrees.tensor)
        seconds = self.overheads.exposed * ring_seconds(links, VALUE_BYTES * self.tokens * self.model.hidden)
        return PassSeconds(4 * seconds, (6 if self.degrees.sequence_parallel else 4) * seconds)

    def _context_collectives(self) -> PassSeconds:
        """All-gathers of keys and values, again in the backward, and the reduce-scatter of their gradients."""
        inner = self.degrees.tensor
        groups = self.degrees.num_ranks // (inner * self.degrees.context)
        links = group_links(self.cluster, self.degrees.context, inner, groups)
        tokens = self.batch.micro_sequences * self.batch.length
        seconds = ring_seconds(links, 2 * VALUE_BYTES * tokens * self.model.key_value_width / inner)
        seconds *= self.overheads.exposed
        return PassSeconds(seconds, 2 * seconds)

    def _expert_exchange(self) -> PassSeconds:
        """Rows to the ranks of their experts, and results back; each rank sends its part of the tokens."""
        experts, ranks = self.model.experts, self.degrees.expert
        assert experts is not None
        rows = self.batch.imbalance * self.tokens / self.degrees.tensor * experts.chosen
        links = group_links(self.cluster, ranks, 1, self.degrees.num_ranks // ranks)
        seconds = exchange_seconds(links, VALUE_BYTES * rows * self.model.hidden, self.cluster.ranks_per_host)
        return PassSeconds(2 * seconds, 2 * seconds)

    def _sharded_weights(self, layer: int) -> PassSeconds:
        """What ZeRO-2 and ZeRO-3 add to a layer: weights are all-gathered before its forward and backward, gradients
        reduce-scattered after it, overlapped with other layers."""
        degrees = self.degrees
        plain, expert = layer_weights(self.model, degrees, layer)
        gather = scatter = 0.0
        for weights, inner, size in (
            (plain, degrees.tensor, degrees.num_shards),
            (expert, degrees.expert, min(degrees.num_shards, degrees.expert_replicas)),
        ):
            links = group_links(self.cluster, size, inner, degrees.num_ranks // (size * inner))
            gather += ring_seconds(links, WEIGHT_BYTES * weights) if degrees.zero == 3 else 0.0
            scatter += ring_seconds(links, GRADIENT_BYTES * weights)
        return PassSeconds(gather, gather + scatter)


def layer_products(
    model: Transformer, layer: int, tokens: float, degrees: Degrees, imbalance: float = 1.0
) -> list[LayerProduct]:
    """Of a layer's forward, on a rank; `imbalance`: rows of the busiest rank's experts over the mean."""
    hidden, t = model.hidden, degrees.tensor
    products = [*_attention_products(model, tokens, t)]
    if model.experts is None or not model.has_experts(layer):
        return [*products, *_mlp_products(model, tokens, model.intermediate / t)]
    experts, own = model.experts, model.experts.num / degrees.expert
    rows = imbalance * tokens / t * experts.chosen / own  # of an expert
    products += [LayerProduct(tokens / t, hidden, experts.num)]
    products += [product._replace(times=own) for product in _mlp_products(model, rows, experts.intermediate)]
    if experts.shared:
        products += _mlp_products(model, tokens, experts.shared * experts.intermediate / t)
    return products


def _attention_products(model: Transformer, tokens: float, t: int) -> Iterator[LayerProduct]:
    hidden = model.hidden
    if model.latent is None:
        yield LayerProduct(tokens, hidden, (model.query_width + 2 * model.key_value_width) / t)
        yield LayerProduct(tokens, model.query_width / t, hidden)
        return
    latent = model.latent
    queries = latent.query_rank or hidden
    if latent.query_rank:
        yield LayerProduct(tokens, hidden, latent.query_rank)
    yield LayerProduct(tokens, queries, model.query_width / t)
    yield LayerProduct(tokens, hidden, latent.key_value_rank + latent.rotary_channels)
    up = model.heads * (model.head_channels - latent.rotary_channels + latent.value_channels)
    yield LayerProduct(tokens, latent.key_value_rank, up / t)
    yield LayerProduct(tokens, model.heads * latent.value_channels / t, hidden)


def _mlp_products(model: Transformer, rows: float, intermediate: float) -> list[LayerProduct]:
    return [
        LayerProduct(rows, model.hidden, (2 if model.gated else 1) * intermediate),
        LayerProduct(rows, intermediate, model.hidden),
    ]
