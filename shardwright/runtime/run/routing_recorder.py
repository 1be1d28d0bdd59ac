"""Record the routing of a model's mixtures of experts in a training step: which rank had how many rows for each expert.

At recorded steps each rank counts in its own calls; one all-gather brings the counts of all ranks together. Evaluation
and recomputed forward passes are not counted.

Shape legend: N tokens; C, H channels; E experts; K experts per token.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.experts.exchange import ParallelExperts
from shardwright.experts.hosts import HostExperts
from shardwright.layers.gates import DROPPED, Routing
from shardwright.layers.moe import MoE
from shardwright.runtime.rank_group import RankGroup
from shardwright.spec.routing import RoutedRows


class RoutingRecorder:
    """Counts in all mixtures of a model, from `begin_step` to `gather`. All ranks make it, and call both."""

    def __init__(self, model: nn.Module, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._counters = {name: _Counter(module) for name, module in model.named_modules() if isinstance(module, MoE)}
        self._exists = any(rank_group.all_gather_json(len(self._counters)))  # a rank of a pipeline may have none

    def begin_step(self, *, is_recorded: bool) -> None:
        """Count the calls of the next step, micro-batches together, if it is recorded."""
        for counter in self._counters.values():
            counter.begin_step(is_recorded=is_recorded)

    def gather(self, step: int) -> list[RoutedRows]:
        """The routing of the step by mixture, on all ranks that have it, in their order; none in other models."""
        if not self._exists:
            return []
        counts = {name: counter.counts() for name, counter in self._counters.items() if counter.num_calls}
        ranks = self._rank_group.all_gather_json(counts)
        records: list[RoutedRows] = []
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            rows, computed, dropped = zip(*(rank[name] for rank in ranks if name in rank), strict=True)
            computed_by_rank = tuple(map(tuple, computed)) if all(computed) else ()
            records.append(RoutedRows(step, name, tuple(map(tuple, rows)), computed_by_rank, sum(dropped)))
        return records


class _Counter:
    """The exchange of a mixture, which counts its rows and leaves the work to the exchange in whose place it is."""

    def __init__(self, mixture: MoE) -> None:
        self._mixture, self._exchange = mixture, mixture.exchange
        self.begin_step(is_recorded=False)
        mixture.exchange = self

    def begin_step(self, *, is_recorded: bool) -> None:
        num_experts = self._mixture.num_experts
        self._is_recorded, self.num_calls, self._dropped = is_recorded, 0, 0
        self._rows_E, self._computed_E = (torch.zeros(num_experts, dtype=torch.int64) for _ in range(2))

    def forward(self, experts: nn.Module, tokens_NC: Tensor, routing: Routing, num_experts: int) -> Tensor:
        out_NH = self._exchange.forward(experts, tokens_NC, routing, num_experts)
        if self._is_recorded and self._mixture.training and not _is_recomputing():
            chosen = routing.experts_NK.flatten()
            kept = chosen[chosen != DROPPED]
            self._rows_E += torch.bincount(kept, minlength=num_experts).cpu()
            self._dropped += len(chosen) - len(kept)
            if isinstance(self._exchange, ParallelExperts | HostExperts):
                self._computed_E += torch.from_numpy(self._exchange.computed_E)
            self.num_calls += 1
        return out_NH

    def counts(self) -> tuple[Any, ...]:
        """Rows by expert that this rank had, and that it computed, if experts are split; and dropped choices."""
        computed = self._computed_E.tolist() if isinstance(self._exchange, ParallelExperts | HostExperts) else []
        return self._rows_E.tolist(), computed, self._dropped


def _is_recomputing() -> bool:
    """Whether a backward pass runs, as in the forward passes of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
