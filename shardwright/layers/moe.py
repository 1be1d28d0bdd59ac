"""Mixture of experts.

Shape legend: B samples, N tokens of all samples, C channels, H output channels, E experts, K experts per token, R rows:
one for each token and expert that it is sent to, ordered by expert.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.kernels.activations import gelu, swiglu
from shardwright.kernels.grouped_products import grouped_linear, repeat_by_group
from shardwright.kernels.triton_modules import triton_module
from shardwright.layers.gates import DROPPED, Routing, TopKGate


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The number of experts, the number of experts per token, and further arguments of `TopKGate`."""

    num_experts: int
    num_chosen: int
    balance: float = 0.0
    z: float = 0.0
    groups: int = 1


class LinearExperts(nn.Module):
    """One linear layer per expert: (R, C) -> (R, H); rows ordered by expert, `sizes_E` rows of each."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize like nn.Linear."""
        bound = self.weight.shape[2] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, rows_RC: Tensor, sizes_E: Tensor) -> Tensor:
        out_RH = grouped_linear(rows_RC, self.weight, sizes_E)
        if self.bias is None:
            return out_RH
        return out_RH + repeat_by_group(self.bias, sizes_E, len(rows_RC)).to(out_RH.dtype)


class GeluExperts(nn.Module):
    """One MLP with one hidden layer per expert."""

    def __init__(self, num_experts: int, channels: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = LinearExperts(num_experts, channels, hidden, bias=bias)
        self.down = LinearExperts(num_experts, hidden, channels, bias=bias)

    def forward(self, rows_RC: Tensor, sizes_E: Tensor) -> Tensor:
        return self.down(gelu(self.up(rows_RC, sizes_E)), sizes_E)


class SwiGluExperts(nn.Module):
    """One MLP per expert whose hidden layer is multiplied by a gate."""

    def __init__(self, num_experts: int, channels: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = LinearExperts(num_experts, channels, hidden, bias=bias)
        self.up = LinearExperts(num_experts, channels, hidden, bias=bias)
        self.down = LinearExperts(num_experts, hidden, channels, bias=bias)

    def forward(self, rows_RC: Tensor, sizes_E: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(rows_RC, sizes_E), self.up(rows_RC, sizes_E)), sizes_E)


EXPERTS = MappingProxyType({"gelu": GeluExperts, "swiglu": SwiGluExperts})  # by the MLP of a decoder


class ExpertExchange(Protocol):
    """Where the experts of a mixture run."""

    def forward(self, experts: nn.Module, tokens_NC: Tensor, routing: Routing, num_experts: int) -> Tensor:
        """Each token's weighted sum of its experts' outputs: (N, H). `experts`: those of this rank."""
        ...


class LocalExperts:
    """All experts are on this device. `gate`: the one that chooses; without one, some choices may be dropped."""

    def __init__(self, gate: TopKGate | None = None) -> None:
        self._gate = gate

    def forward(self, experts: nn.Module, tokens_NC: Tensor, routing: Routing, num_experts: int) -> Tensor:
        is_complete = self._gate is not None and not self._gate.may_drop
        order = order_all_by_expert if is_complete and tokens_NC.is_cuda else order_by_expert
        order_R, sizes_E = order(routing.experts_NK.flatten(), num_experts)
        rows_RC = gather_rows(tokens_NC, order_R, routing.experts_NK.shape[1])
        return combine_rows(experts(rows_RC, sizes_E), order_R, routing)


def order_by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The choices that were not dropped, ordered by expert, and their numbers by expert, on the CPU.

    On the meta device, where they are unknown, as even as possible.
    """
    if chosen.is_meta:
        num = len(chosen)
        sizes = [num // num_experts + (expert < num % num_experts) for expert in range(num_experts)]
        return torch.empty_like(chosen), torch.tensor(sizes, device="cpu")
    sizes_E = torch.bincount(chosen[chosen >= 0], minlength=num_experts).cpu()
    order = chosen.argsort(stable=True)  # dropped choices come first
    return order[len(chosen) - int(sizes_E.sum()) :], sizes_E


def order_all_by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The same if none was dropped; the numbers by expert stay on the device: the CPU does not wait for them."""
    ordered, order = chosen.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=chosen.device))
    return order, starts.diff()


def gather_rows(tokens_NC: Tensor, order_R: Tensor, num_chosen: int) -> Tensor:
    """(R, C): the token of each choice in `order_R`. In backward, the gradients of a token's choices are added in the
    order of the choices, whatever the order of the rows."""
    return _GatherRows.apply(tokens_NC, order_R, num_chosen)  # pyright: ignore[reportReturnType]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens_NC, order_R, num_chosen):
        ctx.save_for_backward(order_R)
        ctx.shape = (len(tokens_NC), num_chosen)
        return tokens_NC.index_select(0, order_R.div(num_chosen, rounding_mode="floor"))

    @staticmethod
    def backward(ctx, grad_RC):
        num_tokens, num_chosen = ctx.shape
        (order_R,) = ctx.saved_tensors
        kernels = triton_module("routing_triton", grad_RC)
        if kernels is not None:
            positions_NK = _positions(order_R, num_tokens * num_chosen, absent=-1).view(num_tokens, num_chosen)
            return kernels.sum_choices(grad_RC, positions_NK, None), None, None
        by_choice = grad_RC.new_zeros(num_tokens * num_chosen, grad_RC.shape[1]).index_copy(0, order_R, grad_RC)
        return by_choice.view(num_tokens, num_chosen, grad_RC.shape[1]).sum(1), None, None


def combine_rows(out_RH: Tensor, order_R: Tensor, routing: Routing) -> Tensor:
    """(N, H): the weighted sum of each token's rows, which are those of the choices in `order_R`."""
    experts_NK = routing.experts_NK
    if not len(out_RH):
        return out_RH.sum(0).expand(len(experts_NK), -1)  # zeros that belong to the graph
    kernels = triton_module("routing_triton", out_RH)
    if kernels is not None:
        positions_NK = _positions(order_R, experts_NK.numel(), absent=-1).view_as(experts_NK)
        return _CombineRows.apply(out_RH, positions_NK, routing.weights_NK, kernels)  # pyright: ignore[reportReturnType]
    positions = _positions(order_R, experts_NK.numel(), absent=0)  # a dropped choice takes any row, and then zeros
    out_NKH = out_RH.index_select(0, positions).unflatten(0, tuple(experts_NK.shape))
    if len(order_R) < experts_NK.numel():
        out_NKH = out_NKH.masked_fill((experts_NK == DROPPED).unsqueeze(2), 0.0)
    return (out_NKH * routing.weights_NK.unsqueeze(2)).sum(1).to(out_RH.dtype)


def _positions(order_R: Tensor, num_choices: int, *, absent: int) -> Tensor:
    """The row of each choice; of a dropped one, `absent`."""
    positions = torch.full((num_choices,), absent, dtype=torch.int64, device=order_R.device)
    return positions.index_copy(0, order_R, torch.arange(len(order_R), device=order_R.device))


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out_RH, positions_NK, weights_NK, kernels):
        ctx.save_for_backward(out_RH, positions_NK, weights_NK)
        ctx.kernels = kernels
        return kernels.sum_choices(out_RH, positions_NK, weights_NK)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_NH):
        out_RH, positions_NK, weights_NK = (saved.contiguous() for saved in ctx.saved_tensors)
        of_rows, of_weights = ctx.kernels.sum_choices_gradient(grad_NH, out_RH, positions_NK, weights_NK)
        return of_rows, None, of_weights, None


class MoE(nn.Module):
    """Each token's weighted sum of the outputs of its experts, which the gate chooses, plus the shared expert's.

    (B, ..., C) -> (B, ..., H), and a penalty for each sample: the gate's auxiliary losses. `experts(rows, sizes)`
    returns one output row per row; `sizes` are the numbers of rows by expert. `exchange` runs them, by default on this
    device.
    """

    exchange: ExpertExchange

    def __init__(self, gate: TopKGate, experts: nn.Module, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared = shared
        self.exchange = LocalExperts(gate)

    @property
    def num_experts(self) -> int:
        return self.gate.scores.out_features

    def forward(self, x_BC: Tensor) -> tuple[Tensor, Tensor]:
        routing = self.gate(x_BC)
        out_NH = self.exchange.forward(self.experts, x_BC.flatten(0, -2), routing, self.num_experts)
        if self.shared is not None:
            out_NH = out_NH + self.shared(x_BC.flatten(0, -2))
        return out_NH.unflatten(0, x_BC.shape[:-1]), routing.penalty_B


class MoEMLP(nn.Module):
    """Mixtures of linear experts, each followed by ReLU, then the linear layer `last`.

    If the gates have auxiliary losses, training returns a pair: the output, and a penalty for each sample.
    """

    def __init__(self, in_features: int, widths: Sequence[int], last: nn.Linear, mixture: MoESpec) -> None:
        super().__init__()
        sizes = (in_features, *widths)
        self.layers = nn.ModuleList(
            MoE(TopKGate(channels, **asdict(mixture)), LinearExperts(mixture.num_experts, channels, width))
            for channels, width in pairwise(sizes)
        )
        self.last = last
        self.has_penalty = bool(widths) and (mixture.balance > 0 or mixture.z > 0)

    def forward(self, x_BC: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        penalties = []
        for layer in self.layers:
            x_BC, penalty_B = layer(x_BC)
            x_BC = functional.relu(x_BC)
            penalties.append(penalty_B)
        out_BH = self.last(x_BC)
        return (out_BH, torch.stack(penalties).sum(0)) if self.training and self.has_penalty else out_BH
