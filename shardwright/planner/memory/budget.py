"""Memory of a rank by tier: what training needs besides tables, and what remains for them.

Shape legend: R ranks.
"""

from dataclasses import dataclass

import numpy as np

from shardwright.planner.chunks import ranks_by_stage
from shardwright.planner.memory import dense_model, pipeline_memory
from shardwright.planner.problem import Problem
from shardwright.spec.cluster import Tier
from shardwright.spec.row_cache import KNOWN_BATCHES, STORE_SPACE, STORES
from shardwright.spec.wire import ID_BYTES

RESERVED_SHARE = 0.1  # of each tier, for the framework, the network library and fragmentation
BATCHES_IN_FLIGHT = 4  # whose ids are held at once: the leads of the step
MORE_WITH_CACHES = 2 + KNOWN_BATCHES


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes that a rank needs besides its tables: by purpose in the fastest tier, and offloaded."""

    memory_parts: tuple[tuple[str, float], ...]
    offloaded_bytes: float
    tiers: tuple[Tier, ...]

    @property
    def free_bytes(self) -> list[float]:
        """Bytes of rows that there is room for, by tier."""
        usable = [
            tier.bytes_ * (1 - RESERVED_SHARE) / (STORE_SPACE if tier.name in STORES else 1) for tier in self.tiers
        ]
        used = [dense_model.total_bytes(self.memory_parts), self.offloaded_bytes, *[0.0] * len(usable)]
        return [capacity - bytes_ for capacity, bytes_ in zip(usable, used, strict=False)]


def memory_budget(problem: Problem) -> MemoryBudget:
    """The budget of the fullest rank, for the dense model, ids, and vectors with their gradients."""
    parts = (*max(_dense_memory_by_stage(problem), key=dense_model.total_bytes), *_sparse_memory(problem))
    return MemoryBudget(parts, dense_model.offloaded_bytes(problem), problem.cluster.device.tiers)


def memory_parts_by_rank(problem: Problem) -> dict[str, np.ndarray]:
    """Bytes of the fastest tier by purpose and rank, besides tables."""
    by_stage = _dense_memory_by_stage(problem)
    ranks = ranks_by_stage(problem) if problem.pipeline is not None else [tuple(range(problem.cluster.num_ranks))]
    by_name: dict[str, np.ndarray] = {}
    for parts, own in zip(by_stage, ranks, strict=True):
        for name, bytes_ in (*parts, *_sparse_memory(problem)):
            by_name.setdefault(name, np.zeros(problem.cluster.num_ranks))[list(own)] = bytes_
    return by_name


def _sparse_memory(problem: Problem) -> dense_model.MemoryParts:
    loads = [load.local_pooling or load for load in problem.table_loads]
    ids = sum(load.ids_per_sample for load in loads) * problem.local_batch_size * ID_BYTES
    vectors = sum(load.vectors * load.table.dim for load in loads) * problem.local_batch_size * 4
    rows = sum(map(problem.row_buffer_bytes, problem.table_loads))
    fits = sum(load.table_bytes for load in loads) <= problem.cluster.num_ranks * problem.cluster.device.tiers[0].bytes_
    batches = BATCHES_IN_FLIGHT + (0 if fits else MORE_WITH_CACHES)
    return (("ids", 2 * batches * ids), ("vectors and their gradients", 2 * vectors + rows))


def _dense_memory_by_stage(problem: Problem) -> list[dense_model.MemoryParts]:
    """Bytes that the dense model takes by purpose, for each pipeline rank; without a pipeline, of any rank."""
    return [dense_model.peak_memory(problem)] if problem.pipeline is None else pipeline_memory.memory_by_stage(problem)


def bytes_text(bytes_: float) -> str:
    """A number of bytes with three digits and a decimal unit."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if bytes_ >= size:
            return f"{bytes_ / size:.3g} {unit}"
    return f"{bytes_ / 1e3:.3g} kB"
