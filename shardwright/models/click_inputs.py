"""What click models are built for: features of a source, the tables of these features, and the forms of MLPs."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shardwright.config import fill_dataclass
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.mlp import MLPForm
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.workload import Feature, Growth, Table


class ClickSource(Protocol):
    """Interface of a click source: (name, rows, is multi-hot) of each feature; number of numeric features. It may have
    `growth`: how tables grow, by feature; `histories`: the feature whose ids a history has, by history; `sides`: the
    history of a side feature; `base_rates`: the mean of each label, by name."""

    @property
    def features(self) -> Sequence[tuple[str, int, bool]]: ...

    @property
    def num_dense(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ClickInputs:
    """What a click model is built for: the features of a source, and the optimizer of their tables."""

    source: ClickSource
    optimizer: SparseOptimizer

    def embedding_bags(self, *dims: int, init: float | None = None, sequences: Collection[str] = ()) -> EmbeddingBags:
        """A table per feature for each of `dims`, reading the same ids; multi-hot features are averaged.

        A history reads the table of the feature whose ids it has. Features in `sequences` are not pooled.
        """
        tables, features = [], []
        growth: Mapping[str, Growth] = getattr(self.source, "growth", {})
        histories: Mapping[str, str] = getattr(self.source, "histories", {})
        for index, dim in enumerate(dims):
            suffix = f"_{index}" if index else ""
            for name, rows, multi_hot in self.source.features:
                table_name = histories.get(name, name) + suffix
                if name not in histories:
                    tables.append(Table(table_name, rows, dim, init=init, growth=growth.get(name)))
                pooling = "none" if name in sequences else "mean" if multi_hot else "sum"
                features.append(Feature(name + suffix, table_name, pooling, ids=name))
        return EmbeddingBags(tables, features, self.optimizer)

    def form(self, mlp: Mapping[str, Any], label: str = "click") -> MLPForm:
        """The form of MLPs from a recipe's section [model.mlp]; the output begins at the base rate of its label."""
        form = fill_dataclass("model.mlp", MLPForm, mlp)
        rates: Mapping[str, float] = getattr(self.source, "base_rates", {})
        rate = rates.get(label)
        if form.output_bias is not None or rate is None or not 0 < rate < 1:
            return form
        return replace(form, output_bias=math.log(rate / (1 - rate)))
