"""Models with a logit for each of several tasks: shared bottom, MMoE, PLE.

Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts" (2018). Tang et al.,
"Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for Personalized Recommendations" (2020).

Shape legend: B samples, T tasks, S streams (the tasks and, last, what they share), W columns of numeric features and
vectors together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.mlp import MLP, PLAIN, MLPForm
from shardwright.layers.task_experts import ExtractionLayer, ExtractionSpec, MultiGateExperts, TaskTowers
from shardwright.layers.task_losses import LabelTask, TaskLosses


class MultiTaskModel(nn.Module):
    """Tables, a dense model that returns logits (B, T), and the losses of its tasks."""

    def __init__(self, sparse: EmbeddingBags, dense: nn.Module, tasks: Sequence[LabelTask]) -> None:
        super().__init__()
        self.sparse = sparse
        self.dense = dense
        self.loss = TaskLosses(tasks)

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class SharedBottomDense(nn.Module):
    """An MLP that all tasks share, and a tower for each."""

    def __init__(
        self,
        width: int,
        num_tasks: int,
        *,
        bottom: Sequence[int],
        tower_hidden: Sequence[int],
        form: MLPForm = PLAIN,
        output_biases: Sequence[float | None] = (),
    ) -> None:
        super().__init__()
        self.num_tasks = num_tasks
        self.bottom = MLP(width, bottom, form=form)
        self.towers = TaskTowers(bottom[-1] if bottom else width, num_tasks, tower_hidden, form, output_biases)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        return self.towers(self.bottom(concat_inputs(batch, vectors)).expand(self.num_tasks, -1, -1))


class MMoEDense(nn.Module):
    """Experts that all tasks share; each task has a gate that weighs them by sample, and a tower."""

    def __init__(
        self,
        width: int,
        num_tasks: int,
        *,
        num_experts: int,
        expert_hidden: Sequence[int],
        tower_hidden: Sequence[int],
        form: MLPForm = PLAIN,
        output_biases: Sequence[float | None] = (),
    ) -> None:
        super().__init__()
        self.experts = MultiGateExperts(width, num_tasks, num_experts, expert_hidden, form)
        self.towers = TaskTowers(expert_hidden[-1], num_tasks, tower_hidden, form, output_biases)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        return self.towers(self.experts(concat_inputs(batch, vectors)))


class PLEDense(nn.Module):
    """Extraction layers, each with experts of each task and shared ones; and a tower for each task."""

    def __init__(
        self,
        width: int,
        num_tasks: int,
        *,
        extraction: ExtractionSpec,
        tower_hidden: Sequence[int],
        form: MLPForm = PLAIN,
        output_biases: Sequence[float | None] = (),
    ) -> None:
        super().__init__()
        self.num_streams = num_tasks + 1
        widths = (width, *[extraction.hidden[-1]] * (extraction.layers - 1))
        self.blocks = nn.ModuleList(
            ExtractionLayer(in_features, num_tasks, extraction, is_last=layer == len(widths) - 1, form=form)
            for layer, in_features in enumerate(widths)
        )
        self.towers = TaskTowers(extraction.hidden[-1], num_tasks, tower_hidden, form, output_biases)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        x_SBW = concat_inputs(batch, vectors).expand(self.num_streams, -1, -1)
        for block in self.blocks:
            x_SBW = block(x_SBW)
        return self.towers(x_SBW)


def concat_inputs(batch: Batch, vectors: Vectors) -> Tensor:
    """The numeric features and all vectors of each sample."""
    return torch.cat([batch.numbers, vectors.pooled_BD], dim=1)
