"""A rank's rows of a parameter whose other rows are on other ranks: parameters of FSDP, and of experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

SHARD = "parameter_shard"  # attribute of a parameter


class ShardedParameters(Protocol):
    """Parameters that are sharded over the same ranks."""

    @property
    def shards(self) -> Sequence[nn.Parameter]:
        """This rank's rows of each."""
        ...

    def all_gather_tensors(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """All-gather full tensors from `parts`, shaped like this rank's shards; blocking, called by all ranks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ParameterShard:
    """This rank's rows of a parameter: their range, and whether this rank writes them to checkpoints.

    `parameters`: the parameters that are sharded together; `index`: the position of this one. Of the replicas of a
    shard, only the one with `is_writer` writes it.
    """

    rows: tuple[int, int]
    full_shape: tuple[int, ...]
    parameters: ShardedParameters
    index: int
    is_writer: bool

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (self.rows[1] - self.rows[0], *self.full_shape[1:])

    def matches_shape(self, values: Tensor) -> bool:
        """Whether `values` has one value per element of this shard."""
        return tuple(values.shape) == self.local_shape

    def mark(self, parameter: nn.Parameter) -> nn.Parameter:
        """Make this the shard of `parameter`."""
        setattr(parameter, SHARD, self)
        return parameter


def shard_of(parameter: Tensor) -> ParameterShard | None:
    """Return the ParameterShard of a sharded parameter; None if it is not sharded."""
    return getattr(parameter, SHARD, None)
