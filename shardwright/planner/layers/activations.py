"""Bytes that a layer saves for its backward.

Each saved tensor is of a kind, and each recomputation policy drops kinds:
    none          saves all
    scores        recomputes the attention scores, if attention stores them (Korthikanti et al., MLSys 2023: selective)
    memory-bound  also outputs of norms and of activation functions: what is recomputed ends at a matrix product
    full          keeps the input of the layer alone
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from shardwright.planner.layers.degrees import Degrees, Recomputation, SequenceBatch
from shardwright.spec.transformer import Transformer

Kind = Literal["layer input", "norm", "product", "activation", "scores", "mask"]
VALUE_BYTES = 2  # of bfloat16
SCORE_BYTES = 5  # of an attention score: softmax, dropped-out softmax, mask
DROPPED: Mapping[Recomputation, frozenset[Kind]] = MappingProxyType(
    {
        "none": frozenset(),
        "scores": frozenset(("scores",)),
        "memory-bound": frozenset(("scores", "norm", "activation")),
        "full": frozenset(("scores", "norm", "activation", "product", "mask")),
    }
)


class Saved(NamedTuple):
    """A saved tensor: bytes of a token. `is_split`: over the tensor ranks, also without sequence parallelism."""

    name: str
    kind: Kind
    bytes_: float
    is_split: bool


class AttentionKernel(NamedTuple):
    """`stores_scores`: not a fused kernel (FlashAttention). `dropout`: masks are saved."""

    stores_scores: bool = False
    dropout: bool = False


FUSED = AttentionKernel()


def saved_tensors(
    model: Transformer, layer: int, length: int, attention: AttentionKernel = FUSED, imbalance: float = 1.0
) -> Iterator[Saved]:
    """Of one token, on a rank without tensor parallelism; `imbalance`: of the rows of its experts."""
    hidden = VALUE_BYTES * model.hidden
    yield Saved("layer input", "layer input", hidden, False)
    yield Saved("attention norm", "norm", hidden, False)
    yield Saved("queries", "product", VALUE_BYTES * model.query_width, True)
    if model.latent is None:
        yield Saved("keys and values", "product", 2 * VALUE_BYTES * model.key_value_width, True)
        value_width = model.query_width
    else:
        value_width = model.heads * model.latent.value_channels
        low_rank = model.latent.query_rank + model.latent.key_value_rank + model.latent.rotary_channels
        yield Saved("low-rank projections", "product", 2 * VALUE_BYTES * low_rank, False)
        yield Saved("keys and values", "product", VALUE_BYTES * (model.query_width + value_width), True)
    if attention.stores_scores:
        yield Saved("scores", "scores", SCORE_BYTES * model.heads * length, True)
    yield Saved("attention output", "product", VALUE_BYTES * value_width, True)
    if attention.dropout:
        yield Saved("dropout masks", "mask", 2 * model.hidden, False)
    yield Saved("MLP input", "product", hidden, False)
    yield Saved("MLP norm", "norm", hidden, False)
    if model.experts is None or not model.has_experts(layer):
        yield from _mlp_tensors(model, "MLP", model.intermediate, 1)
        return
    experts, rows = model.experts, imbalance * model.experts.chosen
    yield Saved("router", "product", 4 * 2 * experts.num, False)  # logits and probabilities, float32
    yield Saved("experts' rows", "product", rows * hidden, False)
    yield from _mlp_tensors(model, "experts", experts.intermediate, rows)
    yield Saved("experts' results", "product", rows * hidden, False)
    if experts.shared:
        yield from _mlp_tensors(model, "shared experts", experts.intermediate, experts.shared)


def _mlp_tensors(model: Transformer, name: str, intermediate: int, copies: float) -> Iterator[Saved]:
    width = VALUE_BYTES * intermediate * copies
    yield Saved(f"{name} first product", "product", width * (2 if model.gated else 1), True)
    yield Saved(f"{name} activation", "activation", width * (2 if model.gated else 1), True)


def saved_bytes(
    model: Transformer, layer: int, batch: SequenceBatch, degrees: Degrees, attention: AttentionKernel = FUSED
) -> float:
    """Bytes of a micro-batch that a rank saves in a layer."""
    return _saved_bytes(
        model,
        model.has_experts(layer),
        batch,
        Degrees(
            (),
            tensor=degrees.tensor,
            context=degrees.context,
            sequence_parallel=degrees.sequence_parallel,
            recompute=degrees.recompute,
        ),
        attention,
    )


@lru_cache(maxsize=4096)
def _saved_bytes(
    model: Transformer, with_experts: bool, batch: SequenceBatch, degrees: Degrees, attention: AttentionKernel
) -> float:
    return sum(layer_bytes(model, model.layers - 1 if with_experts else 0, batch, degrees, attention).values())


def layer_bytes(
    model: Transformer, layer: int, batch: SequenceBatch, degrees: Degrees, attention: AttentionKernel = FUSED
) -> dict[str, float]:
    """Bytes of a micro-batch that a rank saves in a layer, by tensor."""
    tokens, dropped = batch.micro_sequences * batch.length / degrees.context, DROPPED[degrees.recompute]
    return {
        saved.name: saved.bytes_ * tokens / (degrees.tensor if saved.is_split or degrees.sequence_parallel else 1)
        for saved in saved_tensors(model, layer, batch.length, attention, batch.imbalance)
        if saved.kind not in dropped
    }
