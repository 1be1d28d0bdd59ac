"""Batches of consecutive rows of a file to score: every operation is on all rows of a batch at once.

Shape legend: R rows of a block, B samples, C single-id features.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shardwright.data.features.transforms import DecodedChunk, Transforms
from shardwright.data.sources.source import NumpyBatch


def encode_rows(transforms: Transforms, columns: Mapping[str, Any], num: int, max_samples: int) -> Iterator[NumpyBatch]:
    """Transform `num` rows to batches of at most `max_samples`, without labels. `columns`: of the features, as in the
    cache of a log; the batches do not refer to their memory."""
    schema = transforms.schema
    missing: dict[str, Any] = {name: np.zeros(num, np.float32) for name in schema.label_columns.values()}
    if schema.weight is not None:
        missing[schema.weight] = np.ones(num, np.float32)
    chunk = transforms.decode({**missing, **columns})
    for start in range(0, num, max_samples):
        yield _take_rows(transforms, chunk, start, min(start + max_samples, num))


def _take_rows(transforms: Transforms, chunk: DecodedChunk, start: int, end: int) -> NumpyBatch:
    """The batch of rows start to end - 1 of a chunk."""
    names, lists = transforms.single_id_features, transforms.schema.lists
    values = [chunk.ids_RC[start:end].T.reshape(-1)]
    lengths = [np.ones((len(names), end - start), np.int64)]
    for name in lists:
        ids, offsets = chunk.lists[name]
        values.append(ids[offsets[start] : offsets[end]])
        lengths.append(np.diff(offsets[start : end + 1])[None].astype(np.int64))
    return NumpyBatch(
        features=(*names, *lists),
        values=np.concatenate(values, dtype=np.int64),
        lengths=np.concatenate(lengths),
        dense=chunk.numbers_RN[start:end],
        labels={},
    )
