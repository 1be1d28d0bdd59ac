"""What is part of one job and cannot be copied with its model."""

from typing import Any, Self

from shardwright.errors import UserError


class NotCopied:
    """Tables of a built model: they have threads and groups of ranks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise UserError(
            "this model was built with sharded tables or with table rows on disk or in host memory, and cannot be "
            "copied: plan, describe or copy a model before it is built"
        )
