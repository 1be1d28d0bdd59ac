"""The weights that a call of experts uses, and their gradients, computed once all rows have been through backward.

Shape legend: E experts; R rows; C, H channels.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwright.experts.dispatch import Step
from shardwright.kernels.grouped_products import Factors, defer_gradient, weight_gradient
from shardwright.spec.expert_rows import IntArray

EVERYTHING = slice(None)


class CallWeights:
    """Weights by name of a parameter, experts first.

    Backward passes of steps collect what gradients are products of; `gradient` then computes them, each in the order of
    rows that experts/dispatch.py defines, whatever the steps. Gradients of weights that are not used by grouped
    products are computed with each step's backward pass, and added up.
    """

    def __init__(self, weights: Mapping[str, Tensor], sizes_E: IntArray) -> None:
        """`sizes_E`: the rows of each expert over all steps."""
        self.aliases: dict[str, Tensor] = {}
        self._sizes_E = torch.from_numpy(sizes_E)
        self._collected: dict[str, list[Factors]] = {}  # by the backward pass of the current step
        self._steps: list[Step] = []
        self._factors: dict[str, list[list[Factors]]] = {name: [] for name in weights}  # of each step
        self._joined: dict[str, list[Factors]] = {}  # of all steps
        self._sums: dict[str, Tensor] = {}
        for name, weight in weights.items():
            self.aliases[name], self._collected[name] = defer_gradient(weight)

    def backward(self, step: Step, outputs: GradientEdge, inputs: GradientEdge, gradient: Tensor) -> Tensor:
        """The gradient of the inputs of a step, from that of its outputs."""
        self._steps.append(step)
        sources = [inputs, *(get_gradient_edge(alias) for alias in self.aliases.values())]
        of_inputs, *of_weights = torch.autograd.grad([outputs], sources, [gradient], allow_unused=True)
        for (name, factors), other in zip(self._collected.items(), of_weights, strict=True):
            self._factors[name].append([*factors])
            factors.clear()
            if other is not None:
                self._sums[name] = self._sums[name] + other if name in self._sums else other
        return of_inputs

    def add_gradient(self, name: str, expert: int, total: Tensor, outputs: slice = EVERYTHING) -> None:
        """Continue `total`, the gradient of an expert's weight over earlier rows, in place; `outputs`: rows of it."""
        if name not in self._joined:
            self._joined[name] = [self._join(use) for use in zip(*self._factors[name], strict=True)]
        for factors in self._joined[name]:  # a weight may be used several times
            weight_gradient(factors, range(expert, expert + 1), total, outputs)
        if name in self._sums:
            total += self._sums[name][expert, outputs]

    def _join(self, factors: Sequence[Factors]) -> Factors:
        """The factors of several steps as if all rows had come in one."""
        if len(self._steps) == 1:
            return factors[0]
        gradients, rows = [use.gradient_RH for use in factors], [use.rows_RC for use in factors]
        return Factors(self._join_rows(gradients), self._join_rows(rows), self._sizes_E)

    def _join_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of several steps, in their order over all steps."""
        rows = parts[0].new_empty(int(self._sizes_E.sum()), parts[0].shape[1])
        for step, part in zip(self._steps, parts, strict=True):
            assert step.positions is not None
            rows.index_copy_(0, torch.from_numpy(step.positions), part)
        return rows
