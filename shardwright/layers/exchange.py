"""The interface through which EmbeddingBags looks up and updates tables that are sharded over ranks."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from shardwright.comm.pending import Pending
from shardwright.jagged import Jagged, Vectors
from shardwright.spec.optimizer import SparseOptimizer


class Exchange(Protocol):
    """Sharded tables, one method per stage of a step; embeddings/exchange.py implements it."""

    def request(self, features: Jagged, weight: float, stop: int = 0) -> Any: ...

    def announce(self, request: Any) -> Pending[Any]: ...

    def announce_end(self) -> Pending[Tensor]: ...

    def exchange_ids(self, request: Any) -> Pending[Any]: ...

    def route(self, features: Jagged, weight: float) -> Any: ...

    def lookup(self, routed: Any) -> Any: ...

    def reduce_in_host(self, result: Any) -> Pending[Any]: ...

    def exchange_vectors(self, result: Any) -> Pending[Vectors]: ...

    def exchange_gradients(self, routed: Any, gradients: Vectors) -> Pending[Any]: ...

    def broadcast_in_host(self, routed: Any, gradients: Any) -> Pending[Any]: ...

    def concat_micro_batches(self, micro_batches: Sequence[tuple[Any, Any]], decay: float) -> tuple[Any, Any]: ...

    def update(
        self, routed: Any, gradients: Any, optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> Collection[str]: ...  # the features that the loss of any rank used
