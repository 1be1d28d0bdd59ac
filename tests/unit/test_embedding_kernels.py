"""The compiled lookup and update against the reference: every dtype, optimizer, pooling; bits, bounds, rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.kernels import embedding, library
from shardwright.kernels.calls import POOLINGS, Ids, TableState, vector_dtype
from shardwright.spec.optimizer import LAMB, SGD, AdaGrad, Adam, PartialRowWiseAdam, RowWiseAdaGrad, state_shapes

OPTIMIZERS = (
    SGD(0.1),
    SGD(0.1, momentum=0.9, weight_decay=0.01),
    AdaGrad(0.1, weight_decay=0.02, decoupled=True),
    RowWiseAdaGrad(0.1, clip=0.5),
    RowWiseAdaGrad(0.1, weight_decay=0.01),
    Adam(0.1, weight_decay=0.01, decoupled=True),
    Adam(0.1, clip=0.7, weight_decay=0.1),
    PartialRowWiseAdam(0.1),
    LAMB(0.1, weight_decay=0.01, clip=1.0),
)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DIMS = (1, 3, 8, 16, 17, 48, 64, 70, 128, 200)


@pytest.fixture(scope="module")
def reference():
    """reference(True): calls are the reference's from now on; reference(False): the compiled kernels'."""
    patch = pytest.MonkeyPatch()

    def use(it: bool) -> None:
        patch.setattr(embedding, "library", (lambda: None) if it else library.library)

    yield use
    patch.undo()


def some_ids(generator, features, tables, *, batch=7, longest=5, wide=True, weighted=None, hot=False) -> Ids:
    """`features` are (table, pooling); `tables` their rows."""
    values, lengths = [], []
    for table, _ in features:
        length = torch.randint(0, longest + 1, (batch,), generator=generator)
        ids = torch.randint(0, tables[table], (int(length.sum()),), generator=generator)
        if hot:
            ids[torch.rand(ids.numel(), generator=generator) < 0.6] = 0
        values.append(ids)
        lengths.append(length)
    found = torch.cat(values).to(torch.int64 if wide else torch.int32)
    offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    weights = None if weighted is None else torch.rand(found.numel(), generator=generator, dtype=weighted)
    return Ids(found, offsets, weights, [f[0] for f in features], [POOLINGS.index(f[1]) for f in features])


def some_tables(generator, shapes, dtype, optimizer=None):
    weights = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    if optimizer is None:
        return weights
    kept = vector_dtype(dtype)
    return [
        TableState(
            weight,
            [
                torch.rand(state, generator=generator, dtype=kept)
                for state in state_shapes(optimizer, *weight.shape).values()
            ],
            step=3,
            key=12345 + at,
        )
        for at, weight in enumerate(weights)
    ]


def copied(tables):
    return [
        TableState(one.weight.clone(), [state.clone() for state in one.state], one.step, one.key, one.trained)
        for one in tables
    ]


def gradients_like(vectors, generator):
    return [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype) for v in vectors]


SHAPES = st.lists(st.tuples(st.integers(1, 40), st.sampled_from(DIMS)), min_size=1, max_size=4)


@st.composite
def cases(draw):
    shapes = draw(SHAPES)
    feature = st.tuples(st.integers(0, len(shapes) - 1), st.sampled_from(POOLINGS))
    features = draw(st.lists(feature, min_size=1, max_size=6))
    return shapes, features, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 2**31))


def close(mine, theirs, dtype, scale=1.0):
    if dtype == torch.float64:
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    elif mine.dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=1e-2)  # sums that differ a little round apart
    else:
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(case=cases())
def test_lookup_is_the_reference(reference, dtype, case):
    shapes, features, wide, weighted, seed = case
    generator = torch.Generator().manual_seed(seed)
    weights = some_tables(generator, shapes, dtype)
    ids = some_ids(generator, features, [s[0] for s in shapes], wide=wide, weighted=torch.float32 if weighted else None)
    reference(True)
    expected = embedding.lookup(weights, ids)
    reference(False)
    found = embedding.lookup(weights, ids)
    assert [v.shape for v in found] == [v.shape for v in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype == vector_dtype(dtype)
        close(mine, theirs, dtype)
    if not weighted:
        return
    gradients = gradients_like(expected, generator)
    reference(True)
    theirs = embedding.weight_gradients(weights, ids, gradients)
    reference(False)
    close(embedding.weight_gradients(weights, ids, gradients), theirs, dtype, scale=10.0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=12)
@given(case=cases())
def test_update_is_the_reference(reference, dtype, optimizer, case):
    shapes, features, wide, weighted, seed = case
    generator = torch.Generator().manual_seed(seed)
    tables = some_tables(generator, shapes, dtype, optimizer)
    ids = some_ids(generator, features, [s[0] for s in shapes], wide=wide, weighted=torch.float32 if weighted else None)
    reference(True)
    gradients = gradients_like(embedding.lookup([t.weight for t in tables], ids), generator)
    expected = copied(tables)
    embedding.update(expected, ids, gradients, optimizer)
    reference(False)
    embedding.update(tables, ids, gradients, optimizer)
    for mine, theirs in zip(tables, expected, strict=True):
        close(mine.weight, theirs.weight, dtype)
        for one, other in zip(mine.state, theirs.state, strict=True):
            close(one, other, dtype, scale=10.0)
