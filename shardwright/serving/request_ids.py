"""Samples of plain ids, as they are asked about, to a batch: {"ids": {"site": 3, "tags": [1, 5]}, "numbers": [0.5]}."""

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
    """What is not given is empty, or 0."""
    bags: dict[str, list[list[int]]] = {name: [] for name in features}
    rows = []
    for number, sample in enumerate(samples):
        for key in sample:
            if key not in SAMPLE_KEYS:
                key = str(key)[:60]  # a stranger's may be long
                raise UserError(
                    f'sample {number}: unknown key "{key}"{did_you_mean(key, SAMPLE_KEYS)}; wanted ids and numbers'
                )
        ids = sample.get("ids", {})
        if not isinstance(ids, Mapping):
            raise UserError(f'sample {number}: "ids" is {ids!r:.40}; wanted ids by feature')
        for name in ids:
            if name not in bags:
                name = str(name)[:60]
                raise UserError(f'sample {number}: unknown feature "{name}"{did_you_mean(name, features)}')
        for name, bag in bags.items():
            bag.append(_ids(number, name, ids.get(name)))
        rows.append(_numbers(number, sample.get("numbers"), num_dense))
    return Batch(from_lists(bags), torch.tensor(rows, dtype=dtype).view(len(rows), num_dense), {})


def _ids(number: int, name: str, given: Any) -> list[int]:
    found = given if isinstance(given, list) else [] if given is None else [given]
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MAX_ID:
            raise UserError(f'sample {number}: feature "{name}" has {one!r:.40}; wanted ids, whole numbers from 0')
    return found


def _numbers(number: int, given: Any, num_dense: int) -> list[float]:
    if given is None:
        return [0.0] * num_dense
    if not isinstance(given, list) or len(given) != num_dense:
        raise UserError(f'sample {number}: "numbers" is {given!r:.40}; wanted a list of {num_dense}')
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int | float) or not abs(one) < 3.4e38:
            raise UserError(f'sample {number}: "numbers" has {one!r:.40}; wanted finite numbers')
    return given
