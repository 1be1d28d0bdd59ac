"""A batch whose requests have reached the ranks that hold the rows."""

from dataclasses import dataclass, field

from torch import Tensor

from shardwright.embeddings.copies.bounded_group import CopiedBatch
from shardwright.embeddings.incoming import IncomingRequest
from shardwright.embeddings.local_shards import PlacedIds
from shardwright.embeddings.outgoing import OutgoingRequest
from shardwright.kernels.cache_index import BatchRows


@dataclass(frozen=True, slots=True)
class RoutedBatch:
    outgoing: OutgoingRequest
    batch_sizes: tuple[int, ...]  # samples of each rank
    incoming: tuple[IncomingRequest, ...]  # by table group of this rank
    max_replica_values: float  # upper bound on the row and gradient values of table groups replicated on all ranks
    micro_batches: tuple["RoutedBatch", ...] = ()  # with gradient accumulation: one per micro-batch
    # By table group, for those with caches: the distinct rows, once they are announced to the caches.
    announced: list[BatchRows | None] = field(default_factory=list)
    copied: list[CopiedBatch] = field(default_factory=list)  # by group with bounded staleness
    served: list[CopiedBatch] = field(default_factory=list)  # by group on table servers
    placed: list[PlacedIds] = field(default_factory=list)  # by table group, from `prefetch` to `release`

    @property
    def lookups(self) -> tuple["RoutedBatch", ...]:
        return self.micro_batches or (self,)


@dataclass(frozen=True, slots=True)
class LookupResult:
    routed: RoutedBatch
    vectors: tuple[list[Tensor], ...]  # by table group
    host_sums: Tensor | None = None  # sums over the ranks of this host, after the host reduce
