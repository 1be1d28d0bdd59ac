"""HSTU-like ranking: layers over the user's history with the target as last position, whose state scores the target.

Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations"
(2024). Ids of the history and of the target have one table.

Shape legend: B samples, M positions of all sequences, C channels, D columns of a key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config import fill_dataclass
from shardwright.errors import UserError
from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import numeric_columns
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.mlp import PLAIN, MLPForm, logit_mlp
from shardwright.layers.sequence_encoder import SequenceLayer, append_targets
from shardwright.models.click_inputs import ClickInputs
from shardwright.models.history_fields import HistoryFields, aligned_features, find_histories


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Layers of an encoder. Positions that are `max_distance` - 1 or more apart share a bias."""

    num_layers: int
    num_heads: int
    head_dim: int
    max_distance: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise UserError(f"model.encoder.{field.name} is {getattr(self, field.name)}; wanted 1 or more")


class HSTU(nn.Module):
    """Layers over one history, with heads * columns of a head as channels."""

    def __init__(
        self,
        sparse: EmbeddingBags,
        num_dense: int,
        history: HistoryFields,
        encoder: EncoderSpec,
        *,
        hidden: Sequence[int],
        form: MLPForm = PLAIN,
    ) -> None:
        super().__init__()
        self.aligned = aligned_features((history,))
        self.sparse = sparse
        self.dense = HSTUDense(sparse, num_dense, history, encoder, hidden, form)
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class HSTUDense(nn.Module):
    """The dense model of HSTU."""

    def __init__(
        self,
        sparse: EmbeddingBags,
        num_dense: int,
        history: HistoryFields,
        encoder: EncoderSpec,
        hidden: Sequence[int],
        form: MLPForm,
    ) -> None:
        super().__init__()
        self.history = history
        pooled = sum(
            dim for feature, dim in zip(sparse.features, sparse.dims, strict=True) if feature.pooling != "none"
        )
        channels = encoder.num_heads * encoder.head_dim
        self.project = nn.Linear(sparse.dims[0] * len(history.keys), channels)
        self.blocks = nn.ModuleList(
            SequenceLayer(
                channels, num_heads=encoder.num_heads, head_dim=encoder.head_dim, max_distance=encoder.max_distance
            )
            for _ in range(encoder.num_layers)
        )
        self.norm = nn.LayerNorm(channels)
        self.numbers = form.number_embedding(num_dense, sparse.dims[0])
        self.head = logit_mlp(form.number_width(num_dense, sparse.dims[0]) + pooled + channels, hidden, form)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        lengths_B, history = self.history.lengths(batch), self.history
        x_MD, places_B = append_targets(history.join_keys(vectors), history.join_targets(vectors), lengths_B)
        x_MC = self.project(x_MD)
        for block in self.blocks:
            x_MC = block(x_MC, lengths_B + 1)
        state_BC = self.norm(x_MC.index_select(0, places_B))
        numbers = numeric_columns(batch.numbers, self.numbers)
        return self.head(torch.cat([numbers, vectors.pooled_BD, state_BC], dim=1)).squeeze(1)


def hstu(
    inputs: ClickInputs,
    *,
    dim: int,
    encoder: Mapping[str, Any],
    hidden: list[int],
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """HSTU for the only history of a source; `encoder` has the arguments of `EncoderSpec`."""
    spec = fill_dataclass("model.encoder", EncoderSpec, encoder)
    history, *others = find_histories(inputs.source, "hstu")
    if others:
        names = ", ".join(fields.keys[0] for fields in (history, *others))
        raise UserError(f"model.kind=hstu reads one history, and the data has {names}; keep one")
    sparse = inputs.embedding_bags(dim, init=init, sequences=history.keys)
    return HSTU(sparse, inputs.source.num_dense, history, spec, hidden=hidden, form=inputs.form(mlp))
