"""The interface through which a step and EmbeddingBags use tables, in one process or sharded over ranks.

Implementations: LocalExchange (layers/local_exchange.py), where this process has all tables; ShardedTables
(embeddings/exchange.py); HostTables (embeddings/host_tables.py), with a cache in GPU memory; BatchAnnouncer
(embeddings/announcement.py), for models without tables. The runtime calls one
method per stage of a step, in the order in which they are listed here. Each returns a value that only the exchange
itself understands, for its next method. Every rank calls the methods that communicate in the same order, from one
thread.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from shardwright.comm.pending import Pending
from shardwright.jagged import Jagged, Vectors
from shardwright.kernels.cache_index import CacheCounts
from shardwright.spec.optimizer import SparseOptimizer


class Announced(Protocol):
    """What all ranks know of the batch before they exchange its ids."""

    @property
    def share(self) -> float:
        """Weight of this rank's samples / weight of all samples; 0 if no sample has weight."""
        ...

    @property
    def total_weight(self) -> float:
        """Weight of the samples of all ranks."""
        ...

    @property
    def stop_signal(self) -> int:
        """Stop signal that some rank received, equal on all ranks: all stop after this batch. 0: none."""
        ...


class Announcer(Protocol):
    """Announces each local batch to all ranks; a model without tables exchanges nothing else about it."""

    def request(self, ids: Any, /, weight: float, stop: int = 0) -> Any:
        """Prepare the messages of a local batch, without communication.

        Called by stage "request", up to two steps before the batch's forward pass. `ids`: from `EmbeddingBags.read`;
        None for a model without tables. `weight`: of this rank's samples, in a unit equal on all ranks. `stop`: the
        stop signal that this rank received, or 0.
        """
        ...

    def announce(self, request: Any, /) -> Pending[Announced]:
        """Send the sizes of the messages to their receivers, with the batch's weight and the stop signal.

        Called by stage "lengths". Fails on all ranks if only some of them have a batch.
        """
        ...

    def announce_end(self) -> Pending[Any]:
        """Send, in place of `announce`, that this rank has no further batch; called at the end of the data."""
        ...


class Exchange(Announcer, Protocol):
    """Looks up and updates the tables of one EmbeddingBags. Only `update` changes tables."""

    def cache_counts(self) -> dict[str, CacheCounts]:
        """By table with a cache, what the caches of this rank have counted so far."""
        ...

    def write_back(self) -> None:
        """Copy rows that were updated elsewhere to the modules of the tables, before they are read there."""
        ...

    def reload(self) -> None:
        """Copy rows from the modules of the tables to where they are updated; after they were replaced."""
        ...

    def forward(self, features: Jagged, /) -> Vectors:
        """Look up the features of a batch, and wait for all communication.

        Called by `EmbeddingBags.forward`. In a user training loop, where gradients are enabled, the backward pass from
        the result updates the tables.
        """
        ...

    def exchange_ids(self, announced: Any, /) -> Pending[Any]:
        """Send ids to the ranks that hold their rows; the result is for the remaining methods.

        Called by stage "ids", up to one step before the batch's forward pass.
        """
        ...

    def expect(self, ids: Any, /) -> None:
        """Tell caches which rows a batch will use, so that earlier batches do not evict them.

        Called by stage "expect", in plans that have it, some steps before stage "prefetch" of the batch.
        """
        ...

    def forget(self) -> None:
        """Batches that were expected and not prefetched will not be: a run has ended early."""
        ...

    def prefetch(self, ids: Any, /) -> Pending[Any]:
        """Copy rows that are on disk to memory, or from host memory to GPU memory; the lookup's argument.

        Called by stage "prefetch", in plans that have it, up to one step before the batch's forward pass.
        """
        ...

    def release(self, ids: Any, /, *, written: bool) -> None:
        """End a batch's use of the rows that `prefetch` copied; `update` does so itself. `written`: they changed."""
        ...

    def lookup(self, ids: Any, /, *, training: bool = False) -> Any:
        """Look up rows on this rank, without communication.

        Called by stage "lookup", after the update of the previous step. The result may be in buffers that the next
        lookup overwrites. `training`: an update of these rows follows; tables that grow count their uses.
        """
        ...

    def reduce_in_host(self, looked_up: Any, /) -> Pending[Any]:
        """Add partial sums of vectors inside each host. Called by stage "meet", in plans that have it."""
        ...

    def exchange_vectors(self, looked_up: Any, /) -> Pending[Vectors]:
        """Send vectors to the ranks of their samples. Called by stage "vectors"; the caller may change the result."""
        ...

    def exchange_gradients(self, ids: Any, gradients: Vectors, /, *, sum_replicas: bool = True) -> Pending[Any]:
        """Send the gradients of vectors back to the ranks that sent the vectors; does not change `gradients`.

        Called during the backward pass, as soon as all of these gradients exist. `sum_replicas`: also start to sum the
        gradients of replicated rows; without it, `concat_micro_batches` does so.
        """
        ...

    def broadcast_in_host(self, ids: Any, gradients: Any, /) -> Pending[Any]:
        """Send the gradients of sums to all ranks of the host that contributed to them.

        Called by stage "spread", in plans with stage "meet".
        """
        ...

    def concat_micro_batches(self, micro_batches: Sequence[tuple[Any, Any]], /, decay: float) -> tuple[Any, Any]:
        """Concatenate the ids and gradients of a step's micro-batches, for one update.

        Called by stage "update" with gradient accumulation. Gradients of all but the last micro-batch are multiplied by
        `decay`; may change them.
        """
        ...

    def update(
        self, ids: Any, gradients: Any, /, optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> Collection[str]:
        """Update the rows of this rank; returns the features that the loss of any rank used.

        Called by stage "update", through `EmbeddingBags.update`. `steps`: the number of each table's step, from 1.
        """
        ...
