"""Kernels that deduplicate, permute and bucketize ids: compiled and plain versions are equal."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright import library
from shardwright.errors import UserError
from shardwright.kernels import dedup as kernels
from shardwright.kernels.arguments import IdOutOfRange, Ids


@pytest.fixture(scope="module")
def reference():
    patch = pytest.MonkeyPatch()

    def use_reference(enabled: bool) -> None:
        patch.setattr(kernels, "native_library", (lambda: None) if enabled else library.native_library)

    yield use_reference
    patch.undo()


def both(reference, call):
    reference(True)
    plain = call()
    reference(False)
    return plain, call()


def some_ids(seed, *, rows, features, batch, longest=6, wide=True) -> Ids:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (len(features), batch), generator=generator)
    values = [
        torch.randint(0, rows[table], (int(length.sum()),), generator=generator)
        for table, length in zip(features, lengths, strict=True)
    ]
    offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    return Ids(torch.cat(values).to(torch.int64 if wide else torch.int32), offsets, None, features, [0] * len(features))


@pytest.mark.parametrize("batch", [5, 3000])
@given(seed=st.integers(0, 2**31), wide=st.booleans())
def test_unique_rows(reference, batch, seed, wide):
    rows, features = [7, 4000, 30], [1, 0, 1, 2]
    ids = some_ids(seed, rows=rows, features=features, batch=batch, wide=wide)
    expected, actual = both(reference, lambda: kernels.unique_rows(ids, rows))
    distinct, counts, inverse = actual
    assert torch.equal(distinct, expected[0]) and counts == expected[1] and torch.equal(inverse, expected[2])
    assert torch.equal(distinct[inverse], ids.values.long())
    for table_rows in distinct.split(counts):
        assert (table_rows.diff() > 0).all()


@given(seed=st.integers(0, 2**31), order=st.lists(st.integers(0, 3), max_size=9))
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_permute_segments(reference, seed, order, dtype):
    lengths = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(seed))
    values = torch.arange(int(lengths.sum())).to(dtype)
    expected, actual = both(reference, lambda: kernels.permute_segments(values, lengths, order))
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert torch.equal(actual[1], lengths[order])


def test_permute_segments_from_ranks_to_tables():
    """(W, T, B) to (T, W, B): values received from two ranks, grouped by table."""
    lengths = torch.tensor([[1, 0], [2, 1], [0, 1], [1, 1]])  # (rank, table) rows
    values = torch.tensor([0, 10, 10, 11, 100, 110, 111])
    permuted, sizes = kernels.permute_segments(values, lengths, [0, 2, 1, 3])
    assert permuted.tolist() == [0, 100, 10, 10, 11, 110, 111] and sizes.tolist() == [[1, 0], [0, 1], [2, 1], [1, 1]]


@pytest.mark.parametrize("batch", [5, 3000])
@given(seed=st.integers(0, 2**31), wide=st.booleans())
def test_bucketize_ids(reference, batch, seed, wide):
    rows, features = [7, 4000], [1, 0, 1]
    ids = some_ids(seed, rows=rows, features=features, batch=batch, wide=wide)
    boundaries = [[0, 1000, 1000, 4000], [0, 3, 5, 7], [0, 10, 3999, 4000]]
    expected, actual = both(reference, lambda: kernels.bucketize_ids(ids, boundaries))
    assert all(map(torch.equal, actual, expected))
    values, lengths, positions = actual
    assert values.dtype == ids.values.dtype and torch.equal(positions.sort().values, torch.arange(len(values)))
    start = 0
    for bucket in range(3):
        for feature in range(3):
            for bag in range(batch if batch < 10 else 3):
                length = int(lengths[bucket, feature, bag])
                begin, end = (int(ids.offsets[feature * batch + bag + i]) for i in (0, 1))
                bag_ids = ids.values[begin:end]
                low, high = boundaries[feature][bucket], boundaries[feature][bucket + 1]
                bucket_ids = bag_ids[(bag_ids >= low) & (bag_ids < high)] - low
                if batch < 10:
                    assert torch.equal(values[start : start + length], bucket_ids)
                assert length == len(bucket_ids)
                start += length


@pytest.mark.parametrize("use_reference", [True, False])
def test_errors_name_ids_out_of_range(reference, use_reference):
    reference(use_reference)
    ids = Ids(torch.tensor([1, 2, 9]), torch.tensor([0, 2, 3]), None, [0, 0], [0, 0])
    for call in (lambda: kernels.unique_rows(ids, [9]), lambda: kernels.bucketize_ids(ids, [[0, 9], [0, 9]])):
        with pytest.raises(IdOutOfRange) as caught:
            call()
        assert (caught.value.feature, caught.value.id) == (1, 9)
    reference(False)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: kernels.permute_segments(torch.arange(3), torch.ones(3, 1, dtype=torch.int64), [3]),
            "order has segments 3 to 3; wanted 0 to 2",
        ),
        (lambda: kernels.permute_segments(torch.arange(2), torch.ones(3, 1, dtype=torch.int64), [0]), "add up to 3"),
        (
            lambda: kernels.bucketize_ids(some_ids(0, rows=[5], features=[0], batch=2), [[0, 3, 2, 5]]),
            "must not decrease",
        ),
        (
            lambda: kernels.bucketize_ids(some_ids(0, rows=[5], features=[0], batch=2), [[0, 5], [0, 5]]),
            "2 features with",
        ),
    ],
)
def test_errors_in_arguments(call, message):
    with pytest.raises(UserError, match=message):
        call()
