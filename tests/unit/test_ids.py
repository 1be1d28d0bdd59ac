"""Each row once, segments in another order, ids by ranges of rows: compiled against plain torch, and by meaning."""

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

    def use(it: bool) -> None:
        patch.setattr(kernels, "native_library", (lambda: None) if it else library.native_library)

    yield use
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
def test_distinct(reference, batch, seed, wide):
    rows, features = [7, 4000, 30], [1, 0, 1, 2]
    ids = some_ids(seed, rows=rows, features=features, batch=batch, wide=wide)
    (theirs, each, inverse), (mine, counts, places) = both(reference, lambda: kernels.unique_rows(ids, rows))
    assert torch.equal(mine, theirs) and counts == each and torch.equal(places, inverse)
    assert torch.equal(mine[places], ids.values.long())
    for part in mine.split(counts):
        assert (part.diff() > 0).all()


@given(seed=st.integers(0, 2**31), order=st.lists(st.integers(0, 3), max_size=9))
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_permuted(reference, seed, order, dtype):
    lengths = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(seed))
    values = torch.arange(int(lengths.sum())).to(dtype)
    (theirs, expected), (mine, found) = both(reference, lambda: kernels.permute_segments(values, lengths, order))
    assert torch.equal(mine, theirs) and torch.equal(found, expected) and torch.equal(found, lengths[order])


def test_permuted_from_ranks_to_tables():
    """(W, T, B) to (T, W, B): what came from two ranks, table by table."""
    lengths = torch.tensor([[1, 0], [2, 1], [0, 1], [1, 1]])  # (rank, table) rows
    values = torch.tensor([0, 10, 10, 11, 100, 110, 111])
    mine, sizes = kernels.permute_segments(values, lengths, [0, 2, 1, 3])
    assert mine.tolist() == [0, 100, 10, 10, 11, 110, 111] and sizes.tolist() == [[1, 0], [0, 1], [2, 1], [1, 1]]


@pytest.mark.parametrize("batch", [5, 3000])
@given(seed=st.integers(0, 2**31), wide=st.booleans())
def test_bucketized(reference, batch, seed, wide):
    rows, features = [7, 4000], [1, 0, 1]
    ids = some_ids(seed, rows=rows, features=features, batch=batch, wide=wide)
    cuts = [[0, 1000, 1000, 4000], [0, 3, 5, 7], [0, 10, 3999, 4000]]
    (theirs, sizes, before), (mine, lengths, positions) = both(reference, lambda: kernels.bucketize_ids(ids, cuts))
    assert torch.equal(mine, theirs) and torch.equal(lengths, sizes) and torch.equal(positions, before)
    assert mine.dtype == ids.values.dtype and torch.equal(positions.sort().values, torch.arange(len(mine)))
    at = 0
    for piece in range(3):
        for feature in range(3):
            for bag in range(batch if batch < 10 else 3):
                length = int(lengths[piece, feature, bag])
                begin, end = (int(ids.offsets[feature * batch + bag + i]) for i in (0, 1))
                bag_ids = ids.values[begin:end]
                low, high = cuts[feature][piece], cuts[feature][piece + 1]
                expected = bag_ids[(bag_ids >= low) & (bag_ids < high)] - low
                if batch < 10:
                    assert torch.equal(mine[at : at + length], expected)
                assert length == len(expected)
                at += length


@pytest.mark.parametrize("it", [True, False])
def test_ids_outside_are_named(reference, it):
    reference(it)
    ids = Ids(torch.tensor([1, 2, 9]), torch.tensor([0, 2, 3]), None, [0, 0], [0, 0])
    for call in (lambda: kernels.unique_rows(ids, [9]), lambda: kernels.bucketize_ids(ids, [[0, 9], [0, 9]])):
        with pytest.raises(IdOutOfRange) as caught:
            call()
        assert (caught.value.feature, caught.value.id) == (1, 9)
    reference(False)


@pytest.mark.parametrize(
    "call, said",
    [
        (
            lambda: kernels.permute_segments(torch.arange(3), torch.ones(3, 1, dtype=torch.int64), [3]),
            "segments 3 to 3 of 3",
        ),
        (lambda: kernels.permute_segments(torch.arange(2), torch.ones(3, 1, dtype=torch.int64), [0]), "add up to 3"),
        (lambda: kernels.bucketize_ids(some_ids(0, rows=[5], features=[0], batch=2), [[0, 3, 2, 5]]), "do not fall"),
        (
            lambda: kernels.bucketize_ids(some_ids(0, rows=[5], features=[0], batch=2), [[0, 5], [0, 5]]),
            "2 features with",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call, said):
    with pytest.raises(UserError, match=said):
        call()
