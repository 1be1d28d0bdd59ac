"""The compiled lookup and update compared with the reference, for all dtypes, optimizers and poolings; rounding."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import library
from shardwright.errors import UserError
from shardwright.kernels import embedding
from shardwright.kernels.arguments import POOLINGS, IdOutOfRange, Ids, TableState, vector_dtype
from shardwright.spec.optimizer import (
    LAMB,
    SGD,
    AdaGrad,
    Adam,
    PartialRowWiseAdam,
    RowWiseAdaGrad,
    hyperparameters,
    state_shapes,
)

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
def use_reference():
    """use_reference(True): the operators run the reference from now on; use_reference(False): the compiled kernels."""
    patch = pytest.MonkeyPatch()

    def use(is_reference: bool) -> None:
        patch.setattr(embedding, "native_library", (lambda: None) if is_reference else library.native_library)

    yield use
    patch.undo()


def make_ids(generator, features, tables, *, batch=7, max_length=5, wide=True, weighted=None, hot=False) -> Ids:
    """`features`: (table, pooling) of each; `tables`: rows of each table."""
    values, lengths = [], []
    for table, _ in features:
        length = torch.randint(0, max_length + 1, (batch,), generator=generator)
        ids = torch.randint(0, tables[table], (int(length.sum()),), generator=generator)
        if hot:
            ids[torch.rand(ids.numel(), generator=generator) < 0.6] = 0
        values.append(ids)
        lengths.append(length)
    values_ = torch.cat(values).to(torch.int64 if wide else torch.int32)
    offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    weights = None if weighted is None else torch.rand(values_.numel(), generator=generator, dtype=weighted)
    return Ids(values_, offsets, weights, [f[0] for f in features], [POOLINGS.index(f[1]) for f in features])


def make_tables(generator, shapes, dtype, optimizer=None):
    weights = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    if optimizer is None:
        return weights
    state_dtype = vector_dtype(dtype)
    return [
        TableState(
            weight,
            [
                torch.rand(state, generator=generator, dtype=state_dtype)
                for state in state_shapes(optimizer, *weight.shape).values()
            ],
            step=3,
            rounding_key=12345 + i,
        )
        for i, weight in enumerate(weights)
    ]


def copy_tables(tables):
    return [
        TableState(t.weight.clone(), [state.clone() for state in t.state], t.step, t.rounding_key, t.is_trained)
        for t in tables
    ]


def random_gradients(vectors, generator):
    return [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype) for v in vectors]


SHAPES = st.lists(st.tuples(st.integers(1, 40), st.sampled_from(DIMS)), min_size=1, max_size=4)


@st.composite
def cases(draw):
    shapes = draw(SHAPES)
    feature = st.tuples(st.integers(0, len(shapes) - 1), st.sampled_from(POOLINGS))
    features = draw(st.lists(feature, min_size=1, max_size=6))
    return shapes, features, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 2**31))


def assert_close(actual, expected, dtype, scale=1.0):
    if dtype == torch.float64:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    elif actual.dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(actual, expected, rtol=2**-6, atol=1e-2)  # nearly equal sums may round apart
    else:
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(case=cases())
def test_lookup_equals_the_reference(use_reference, dtype, case):
    shapes, features, wide, weighted, seed = case
    generator = torch.Generator().manual_seed(seed)
    weights = make_tables(generator, shapes, dtype)
    ids = make_ids(generator, features, [s[0] for s in shapes], wide=wide, weighted=torch.float32 if weighted else None)
    use_reference(True)
    expected = embedding.lookup(weights, ids)
    use_reference(False)
    vectors = embedding.lookup(weights, ids)
    assert [v.shape for v in vectors] == [v.shape for v in expected]
    for actual, ref in zip(vectors, expected, strict=True):
        assert actual.dtype == ref.dtype == vector_dtype(dtype)
        assert_close(actual, ref, dtype)
    if not weighted:
        return
    gradients = random_gradients(expected, generator)
    use_reference(True)
    ref = embedding.id_weight_gradients(weights, ids, gradients)
    use_reference(False)
    assert_close(embedding.id_weight_gradients(weights, ids, gradients), ref, dtype, scale=10.0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=12)
@given(case=cases())
def test_update_equals_the_reference(use_reference, dtype, optimizer, case):
    shapes, features, wide, weighted, seed = case
    generator = torch.Generator().manual_seed(seed)
    tables = make_tables(generator, shapes, dtype, optimizer)
    ids = make_ids(generator, features, [s[0] for s in shapes], wide=wide, weighted=torch.float32 if weighted else None)
    use_reference(True)
    gradients = random_gradients(embedding.lookup([t.weight for t in tables], ids), generator)
    expected = copy_tables(tables)
    embedding.update(expected, ids, gradients, optimizer)
    use_reference(False)
    embedding.update(tables, ids, gradients, optimizer)
    for actual, ref in zip(tables, expected, strict=True):
        assert_close(actual.weight, ref.weight, dtype)
        for state, ref_state in zip(actual.state, ref.state, strict=True):
            assert_close(state, ref_state, dtype, scale=10.0)


def large_update(optimizer, dtype, *, threads, level=None, batch=700, hot=True):
    """Vectors, weights and states of an update large enough for several threads and for rows of many chunks."""
    generator = torch.Generator().manual_seed(5)
    tables = make_tables(generator, [(300, 33), (5, 64), (100_000, 16)], dtype, optimizer)
    features = [(0, "sum"), (1, "mean"), (2, "none"), (0, "sum")]
    ids = make_ids(generator, features, [300, 5, 100_000], batch=batch, max_length=9, hot=hot)
    previous = torch.get_num_threads(), library.native_library().shardwright_level()
    torch.set_num_threads(threads)
    try:
        assert library.native_library().shardwright_set_level(level or previous[1])
        vectors = embedding.lookup([t.weight for t in tables], ids)
        embedding.update(tables, ids, random_gradients(vectors, generator), optimizer)
    finally:
        torch.set_num_threads(previous[0])
        library.native_library().shardwright_set_level(previous[1])
    return [*vectors, *(t.weight for t in tables), *(s for t in tables for s in t.state)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads_gives_the_same_bits(optimizer, dtype):
    single = large_update(optimizer, dtype, threads=1)
    for threads in (2, 3, 8):
        assert all(map(torch.equal, single, large_update(optimizer, dtype, threads=threads)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_any_instruction_set_gives_the_same_bits(optimizer, dtype):
    best = large_update(optimizer, dtype, threads=1)
    assert library.native_library().shardwright_set_level(b"baseline")
    assert not library.native_library().shardwright_set_level(b"no such level")
    library.native_library().shardwright_set_level(library.native_library().shardwright_level())
    for level in (b"baseline", b"avx2"):
        is_supported = library.native_library().shardwright_set_level(level)
        if is_supported:
            assert all(map(torch.equal, best, large_update(optimizer, dtype, threads=1, level=level)))


def test_hot_rows_equal_the_reference(use_reference):
    use_reference(True)
    expected = large_update(Adam(0.1), torch.float64, threads=1)
    use_reference(False)
    for actual, ref in zip(large_update(Adam(0.1), torch.float64, threads=2), expected, strict=True):
        torch.testing.assert_close(actual, ref, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_equals_the_reference_bit_for_bit(use_reference, dtype):
    """With one lookup per row both have equal sums, so only the rounding could differ."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([1e-9, 1e-7, 1e-5, 1e-3, 1.0, 3e4, 1e6, 1e38])
    weight = torch.zeros(len(scales) * 50, 37, dtype=dtype)
    gradient = torch.randn(weight.shape, generator=generator) * scales.repeat_interleave(50)[:, None]
    gradient[7, 3], gradient[8, 3], gradient[9, 3] = float("inf"), float("-inf"), float("nan")
    largest = torch.finfo(torch.float32).max
    gradient[10], gradient[11], gradient[12], gradient[13] = largest, -largest, 65519.0, -65536.0
    rows = torch.arange(weight.shape[0])
    ids = Ids(rows, torch.arange(len(rows) + 1), None, [0], [0])
    bits = []
    for is_reference in (True, False):
        use_reference(is_reference)
        table = TableState(weight.clone(), (), 9, 77)
        embedding.update([table], ids, [gradient], SGD(lr=-1.0))
        bits.append(table.weight.view(torch.int16))
    use_reference(False)
    assert torch.equal(*bits)
    same_nan = gradient.isnan() == bits[0].view(dtype).isnan()
    assert same_nan.all() and torch.isinf(bits[0].view(dtype)[7, 3])
    assert torch.equal(gradient.isinf(), bits[0].view(dtype).isinf())  # finite values that overflow are clamped


@pytest.mark.parametrize("dtype, spacing", [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)], ids=str)
def test_rounding_has_no_bias(dtype, spacing):
    """A value between two neighbours rounds up with a probability equal to its distance from the lower one."""
    share = 0.3
    value = 0.5 + share * spacing * 2 * 0.5
    rows, dim = 2000, 64
    table = TableState(torch.zeros(rows, dim, dtype=dtype), (), 1, 3)
    ids = Ids(torch.arange(rows), torch.arange(rows + 1), None, [0], [0])
    embedding.update([table], ids, [torch.full((rows, dim), value)], SGD(lr=-1.0))
    is_up = (table.weight.double() > 0.5).double()
    assert set(table.weight.double().unique().tolist()) == {0.5, 0.5 + spacing}
    deviation = (share * (1 - share) / is_up.numel()) ** 0.5
    assert abs(is_up.mean().item() - share) < 5 * deviation
    assert abs(is_up.var().item() - share * (1 - share)) < 0.01
    for means in (is_up.mean(0), is_up.mean(1)):  # no column and no row rounds up more often than by chance
        assert means.std().item() < 1.3 * (share * (1 - share) / (is_up.numel() / means.numel())) ** 0.5


def test_small_steps_are_not_lost():
    """500 steps of a hundredth of the bf16 spacing at 1; rounding to nearest would lose all of them."""
    table = torch.ones(1, 256, dtype=torch.bfloat16)
    ids = Ids(torch.tensor([0]), torch.tensor([0, 1]), None, [0], [0])
    for step in range(1, 501):
        embedding.update([TableState(table, (), step, 1)], ids, [torch.ones(1, 256)], SGD(lr=2.0**-7 / 100))
    assert abs(table.double().mean().item() - (1 - 500 * 2.0**-7 / 100)) < 0.003


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("bad_id", [-1, 40, 2**31 - 1])
@pytest.mark.parametrize("position", [0, 5000, 9999])
def test_an_id_out_of_range_is_refused_before_anything_is_written(wide, bad_id, position):
    values = torch.randint(0, 40, (10_000,), dtype=torch.int64 if wide else torch.int32)
    values[position] = bad_id
    ids = Ids(values, torch.arange(0, 10_001, 10), None, [0, 1], [0, 2])
    weights = [torch.zeros(40, 8), torch.zeros(40, 8)]
    with pytest.raises(IdOutOfRange) as error:
        embedding.lookup(weights, ids)
    assert (error.value.feature, error.value.id) == (position // 5000, bad_id)
    tables = [TableState(weight, (), 1, 0) for weight in weights]
    with pytest.raises(IdOutOfRange):
        embedding.update(tables, ids, [torch.ones(500, 8), torch.ones(5000, 8)], SGD(0.1))
    assert not any(weight.any() for weight in weights)


def test_rows_above_31_bits():
    """The table consists of untouched zero pages; only pages that are written take memory."""
    rows = 2**31 + 10
    weight = torch.from_numpy(np.zeros((rows, 1), dtype=np.int16)).view(torch.bfloat16)
    ids = Ids(torch.tensor([rows - 1, 3, rows - 1]), torch.tensor([0, 2, 3]), None, [0], [0])
    embedding.update([TableState(weight, (), 1, 0)], ids, [torch.ones(2, 1)], SGD(lr=-1.0))
    assert weight[[rows - 1, 3, rows - 2], 0].tolist() == [2.0, 1.0, 0.0]
    assert embedding.lookup([weight], ids)[0].tolist() == [[3.0], [2.0]]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda ids: replace(ids, offsets=ids.offsets.int()), "offsets are torch.int32 .*; wanted int64"),
        (lambda ids: replace(ids, offsets=ids.offsets[:-1]), "lengths add up to 2, but there are 3 ids"),
        (lambda ids: replace(ids, tables=[0, 0], pooling=[0, 0]), "4 offsets for 2 features"),
        (lambda ids: replace(ids, values=ids.values.double()), "ids are torch.float64"),
        (lambda ids: replace(ids, values=ids.values[:2]), "lengths add up to 3, but there are 2 ids"),
        (lambda ids: replace(ids, weights=torch.ones(2)), "2 id weights for 3 ids"),
        (lambda ids: replace(ids, tables=[0, 0]), "4 offsets for 2 features"),
    ],
)
def test_inconsistent_ids_are_refused(change, message):
    ids = Ids(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2, 3]), None, [0], [0])
    with pytest.raises(UserError, match=message):
        embedding.lookup([torch.zeros(4, 4)], change(ids))


def test_float64_and_float32_tables_in_one_call_are_refused():
    ids = Ids(torch.tensor([0, 1]), torch.tensor([0, 1, 2]), None, [0, 1], [0, 0])
    with pytest.raises(UserError, match="float64 tables and others in one call"):
        embedding.lookup([torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.float64)], ids)


def test_updating_two_tables_that_share_a_weight_is_refused():
    """Both would be updated at the same time. Looking both up, or updating only one of them, is allowed."""
    weight, ids = torch.zeros(4, 4), Ids(torch.tensor([0, 1]), torch.tensor([0, 1, 2]), None, [0, 1], [0, 0])
    embedding.lookup([weight, weight], ids)
    trainable, frozen = TableState(weight, (), 1, 0), TableState(weight, (), 1, 0, is_trained=False)
    embedding.update([trainable, frozen], ids, [torch.ones(1, 8)], SGD(0.1))
    with pytest.raises(UserError, match="two tables share one weight"):
        embedding.update([trainable, trainable], ids, [torch.ones(1, 8)], SGD(0.1))


def test_gradients_may_be_strided():
    ids = Ids(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 3]), None, [0], [0])
    for gradient in (torch.randn(1, 6).expand(2, 6), torch.randn(6, 2).t(), torch.randn(2, 9)[:, 1:7]):
        weights = [torch.zeros(3, 6), torch.zeros(3, 6)]
        for weight, grad in zip(weights, (gradient, gradient.contiguous()), strict=True):
            embedding.update([TableState(weight, (), 1, 0)], ids, [grad], SGD(lr=1.0))
        assert torch.equal(*weights)


def test_operators_pass_torchs_own_checks():
    generator = torch.Generator().manual_seed(0)
    weights = [w.requires_grad_() for w in make_tables(generator, [(9, 4), (5, 3)], torch.float64)]
    ids = make_ids(generator, [(0, "sum"), (1, "mean"), (0, "sum")], [9, 5], weighted=torch.float64)
    arguments = (weights, ids.values, ids.offsets, ids.weights.requires_grad_(), ids.tables, ids.pooling)
    embedding.lookup(weights, ids)
    torch.library.opcheck(torch.ops.shardwright.embedding_lookup.default, arguments)
    vectors = [v.detach() for v in embedding.lookup(weights, ids)]
    assert torch.autograd.gradcheck(
        lambda a, b, w: embedding.lookup([a, b], replace(ids, weights=w))[0], (*weights, ids.weights)
    )
    tables = [w.detach().clone() for w in weights]
    update = (tables, [], vectors, [], ids.values, ids.offsets, None, ids.tables, ids.pooling, [])
    torch.library.opcheck(
        torch.ops.shardwright.embedding_update.default,
        (*update, "sgd", list(hyperparameters(SGD(0.1)).values()), [1, 0, 1, 1, 0, 1], [None, None]),
    )


def test_gradients_without_an_optimizer():
    """Gradients of full tables; None for a frozen table; zeros where the loss does not depend on the vectors."""
    generator = torch.Generator().manual_seed(0)
    weights = make_tables(generator, [(9, 4), (5, 3), (6, 2)], torch.float64)
    ids = make_ids(generator, [(0, "sum"), (1, "none"), (2, "sum")], [9, 5, 6])
    weights[0].requires_grad_()
    weights[1].requires_grad_()
    pooled, _ = embedding.lookup(weights, ids)
    (pooled**2).sum().backward()
    assert weights[0].grad.abs().sum() > 0 and not weights[1].grad.any() and weights[2].grad is None
    values, lengths, _ = ids.split_by_feature()[0]
    torch_weight = weights[0].detach().clone().requires_grad_()
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
    (torch.nn.functional.embedding_bag(values, torch_weight, starts, mode="sum") ** 2).sum().backward()
    torch.testing.assert_close(weights[0].grad, torch_weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_the_update_of_a_row_does_not_depend_on_other_rows_in_the_batch(optimizer):
    """A row-wise shard, which has fewer lookups, then trains exactly like the full table."""
    generator = torch.Generator().manual_seed(3)
    full = make_tables(generator, [(50, 33)], torch.float32, optimizer)
    shard = [TableState(t.weight[:20].clone(), [s[:20].clone() for s in t.state], t.step, t.rounding_key) for t in full]
    ids = make_ids(generator, [(0, "sum")], [50], batch=3000, max_length=6, hot=True)
    gradient = torch.randn(3000, 33, generator=generator)
    embedding.update(full, ids, [gradient], optimizer)
    in_shard = ids.values < 20
    offsets = torch.nn.functional.pad(in_shard.cumsum(0), (1, 0))[ids.offsets]
    embedding.update(shard, replace(ids, values=ids.values[in_shard], offsets=offsets), [gradient], optimizer)
    assert (ids.values == 0).sum() > 5000
    assert torch.equal(shard[0].weight, full[0].weight[:20])
    assert all(torch.equal(a, b[:20]) for a, b in zip(shard[0].state, full[0].state, strict=True))
