"""Parse samples of plain ids, {"ids": {"site": 3, "tags": [1, 5]}, "numbers": [0.5]}, to a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.errors import UserError, did_you_mean
from shardwright.jagged import Batch, from_lists

MAX_ID = 2**63 - 1
SAMPLE_KEYS = ("ids", "numbers")


def parse_id_samples(
    features: Sequence[str], num_dense: int, samples: Sequence[Mapping[str, Any]], dtype: torch.dtype = torch.float32
) -> Batch:
    """Parse samples to a batch. A missing feature has no ids; missing numeric features are 0."""
    bags: dict[str, list[list[int]]] = {name: [] for name in features}
    numbers = []
    for index, sample in enumerate(samples):
        for key in sample:
            if key not in SAMPLE_KEYS:
                key = str(key)[:60]  # a client's key may be of any length
                raise UserError(
                    f'sample {index}: unknown key "{key}"{did_you_mean(key, SAMPLE_KEYS)}; wanted ids and numbers'
                )
        ids = sample.get("ids", {})
        if not isinstance(ids, Mapping):
            raise UserError(f'sample {index}: "ids" is {ids!r:.40}; wanted ids by feature')
        for name in ids:
            if name not in bags:
                name = str(name)[:60]
                raise UserError(f'sample {index}: unknown feature "{name}"{did_you_mean(name, features)}')
        for name, bag in bags.items():
            bag.append(_parse_ids(index, name, ids.get(name)))
        numbers.append(_parse_numbers(index, sample.get("numbers"), num_dense))
    return Batch(from_lists(bags), torch.tensor(numbers, dtype=dtype).view(len(numbers), num_dense), {})


def _parse_ids(index: int, name: str, value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id_ in ids:
        if isinstance(id_, bool) or not isinstance(id_, int) or not 0 <= id_ <= MAX_ID:
            raise UserError(f'sample {index}: feature "{name}" has {id_!r:.40}; wanted ids, whole numbers from 0')
    return ids


def _parse_numbers(index: int, value: Any, num_dense: int) -> list[float]:
    if value is None:
        return [0.0] * num_dense
    if not isinstance(value, list) or len(value) != num_dense:
        raise UserError(f'sample {index}: "numbers" is {value!r:.40}; wanted a list of {num_dense}')
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 3.4e38:
            raise UserError(f'sample {index}: "numbers" has {number!r:.40}; wanted finite numbers')
    return value
