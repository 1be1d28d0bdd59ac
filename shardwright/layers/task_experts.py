"""Layers of multi-task models: experts that all samples use, gates that weigh them by sample, and towers.

Shape legend: B samples, T tasks, S streams (the tasks and, last, what they share), E experts, W columns of an input,
H columns of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.layers.mlp import MLP, PLAIN, MLPForm, logit_mlp


class DenseExperts(nn.Module):
    """MLPs of the same widths over the same input: (B, W) -> (B, E, H). Every sample uses all of them."""

    def __init__(self, in_features: int, num: int, widths: Sequence[int], form: MLPForm = PLAIN) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(MLP(in_features, widths, form=form) for _ in range(num))

    def forward(self, x_BW: Tensor) -> Tensor:
        return torch.stack([mlp(x_BW) for mlp in self.mlps], dim=1)


class SoftmaxGate(nn.Module):
    """The mean of experts, weighted by softmax(W x) of each sample: (B, W), (B, E, H) -> (B, H)."""

    def __init__(self, in_features: int, num_experts: int) -> None:
        super().__init__()
        self.scores = nn.Linear(in_features, num_experts, bias=False)

    def forward(self, x_BW: Tensor, experts_BEH: Tensor) -> Tensor:
        weights_BE = self.scores(x_BW).softmax(1)
        return (weights_BE.unsqueeze(1).to(experts_BEH.dtype) @ experts_BEH).squeeze(1)


class MultiGateExperts(nn.Module):
    """Experts that all tasks share, and a gate for each task (MMoE): (B, W) -> (T, B, H)."""

    def __init__(
        self, in_features: int, num_tasks: int, num_experts: int, widths: Sequence[int], form: MLPForm = PLAIN
    ) -> None:
        super().__init__()
        check_experts("expert_hidden", widths, num_experts=num_experts)
        self.experts = DenseExperts(in_features, num_experts, widths, form)
        self.gates = nn.ModuleList(SoftmaxGate(in_features, num_experts) for _ in range(num_tasks))

    def forward(self, x_BW: Tensor) -> Tensor:
        experts_BEH = self.experts(x_BW)
        return torch.stack([gate(x_BW, experts_BEH) for gate in self.gates])


@dataclass(frozen=True, slots=True)
class ExtractionSpec:
    """The extraction layers of PLE, all alike."""

    experts: int  # of each task
    shared: int  # experts that all tasks use
    hidden: Sequence[int]  # widths of the layers of an expert
    layers: int = 2

    def __post_init__(self) -> None:
        check_experts(
            "extraction.hidden",
            self.hidden,
            **{f"extraction.{name}": getattr(self, name) for name in ("experts", "shared", "layers")},
        )


class ExtractionLayer(nn.Module):
    """Experts of each task and shared experts, and a gate for each stream (PLE): (S, B, W) -> (S, B, H).

    The gate of a task weighs its own experts and the shared ones; the gate of the shared stream weighs all experts.
    The last layer has no shared stream in its result: (T, B, H).
    """

    def __init__(
        self, in_features: int, num_tasks: int, spec: ExtractionSpec, *, is_last: bool, form: MLPForm = PLAIN
    ) -> None:
        super().__init__()
        sizes = (*[spec.experts] * num_tasks, spec.shared)
        self.experts = nn.ModuleList(DenseExperts(in_features, size, spec.hidden, form) for size in sizes)
        self.gates = nn.ModuleList(SoftmaxGate(in_features, spec.experts + spec.shared) for _ in range(num_tasks))
        if not is_last:
            self.gates.append(SoftmaxGate(in_features, sum(sizes)))

    def forward(self, x_SBW: Tensor) -> Tensor:
        experts = [module(x_BW) for module, x_BW in zip(self.experts, x_SBW.unbind(), strict=True)]
        *own, shared = experts
        inputs = [torch.cat([own_BEH, shared], dim=1) for own_BEH in own]
        inputs += [torch.cat(experts, dim=1)] if len(self.gates) == len(experts) else []
        return torch.stack([gate(x_SBW[row], inputs[row]) for row, gate in enumerate(self.gates)])


class TaskTowers(nn.Module):
    """An MLP to one logit for each task: (T, B, W) -> (B, T).

    `output_biases`: where the bias of each task's logit begins; default: that of `form` for all tasks.
    """

    def __init__(
        self,
        in_features: int,
        num_tasks: int,
        hidden: Sequence[int],
        form: MLPForm = PLAIN,
        output_biases: Sequence[float | None] = (),
    ) -> None:
        super().__init__()
        biases = output_biases or [form.output_bias] * num_tasks
        if len(biases) != num_tasks:
            raise UserError(f"{len(biases)} output_biases of {num_tasks} tasks; give one for each task, or none")
        self.mlps = nn.ModuleList(logit_mlp(in_features, hidden, replace(form, output_bias=bias)) for bias in biases)

    def forward(self, x_TBW: Tensor) -> Tensor:
        return torch.cat([mlp(x_BW) for mlp, x_BW in zip(self.mlps, x_TBW.unbind(), strict=True)], dim=1)


def check_experts(key: str, widths: Sequence[int], **numbers: int) -> None:
    """Raise an error for experts without layers, or fewer than one of them."""
    if not widths:
        raise UserError(f"{key}=[]; give the widths of an expert's layers, such as [64, 32]")
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name}={number}; wanted 1 or more")
