"""The seam of EmbeddingBags: an exchange serves tables whose rows lie on other ranks."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from shardwright.comm.pending import Pending
from shardwright.jagged import Jagged, Vectors
from shardwright.spec.optimizer import SparseOptimizer


class Exchange(Protocol):
    """The seam through which tables may live elsewhere: ids go out, vectors come back, gradients return."""

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
    ) -> Collection[str]: ...  # the features that some rank's loss used
