"""The Triton kernels compared with the reference: on a GPU if there is one, else in Triton's interpreter."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from test_embedding_kernels import (
    DTYPES,
    OPTIMIZERS,
    assert_close,
    cases,
    copy_tables,
    make_ids,
    make_tables,
    random_gradients,
)

from shardwright.kernels import embedding, reference
from shardwright.kernels.arguments import IdOutOfRange, empty_vectors, validate_lookup, with_bounds
from shardwright.spec.optimizer import SGD, AdaGrad, RowWiseAdaGrad

pytest.importorskip("triton", reason="needs triton: pip install shardwright[gpu]")
kernels = import_module("shardwright.kernels.embedding_triton")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def to_device(x):
    if isinstance(x, torch.Tensor):
        return x.to(DEVICE)
    if isinstance(x, list):
        return [to_device(item) for item in x]
    names = ("values", "offsets", "weights") if hasattr(x, "values") else ("weight", "state")
    return replace(x, **{name: to_device(value) for name in names if (value := getattr(x, name)) is not None})


def make_inputs(case, dtype, optimizer=None, **id_options):
    shapes, features, wide, weighted, seed = case
    generator = torch.Generator().manual_seed(seed)
    tables = make_tables(generator, shapes, dtype, optimizer)
    weights = torch.float32 if weighted else None
    ids = make_ids(generator, features, [shape[0] for shape in shapes], wide=wide, weighted=weights, **id_options)
    return to_device(tables), to_device(ids), generator


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=5)
@given(case=cases())
def test_lookup_equals_the_reference(dtype, case):
    tables, ids, generator = make_inputs(case, dtype)
    vectors, expected = empty_vectors(tables, ids), empty_vectors(tables, ids)
    vectors, expected = to_device(vectors), to_device(expected)
    kernels.lookup_all(tables, ids, vectors)
    reference.lookup_all(tables, ids, expected)
    for actual, ref in zip(vectors, expected, strict=True):
        assert_close(actual, ref, dtype)
    gradients = to_device(random_gradients(expected, generator))
    actual, ref = (torch.empty(ids.values.numel(), dtype=expected[0].dtype, device=DEVICE) for _ in range(2))
    kernels.id_weight_gradients_all(tables, ids, gradients, actual)
    reference.id_weight_gradients_all(tables, ids, gradients, ref)
    assert_close(actual, ref, dtype, scale=10.0)


@settings(max_examples=5)
@given(case=cases())
def test_ids_with_bounds_are_not_checked_again(case):
    """The results are those with checks; a bound beyond a table is an error on the CPU, without a kernel."""
    tables, ids, generator = make_inputs(case, torch.float32, SGD(0.1))
    weights = [table.weight for table in tables]
    bounded = with_bounds(ids, [weights[table].shape[0] for table in ids.tables])
    vectors, expected = (to_device(empty_vectors(weights, ids)) for _ in range(2))
    kernels.lookup_all(weights, bounded, vectors)
    kernels.lookup_all(weights, ids, expected)
    assert all(torch.equal(*pair) for pair in zip(vectors, expected, strict=True))
    gradients, updated = to_device(random_gradients(expected, generator)), copy_tables(tables)
    kernels.update_all(updated, bounded, gradients, SGD(0.1))
    kernels.update_all(tables, ids, gradients, SGD(0.1))
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(updated, tables, strict=True))
    wide = with_bounds(ids, [bound + 1 for bound in bounded.bounds])
    with pytest.raises(IdOutOfRange):
        validate_lookup(weights, wide)
    assert replace(bounded, values=ids.values + 1).bounds is None  # no longer known


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@settings(max_examples=3)
@given(case=cases())
def test_update_equals_the_reference(optimizer, case):
    for dtype in (torch.float64, torch.float32) if case[-1] % 2 else (torch.float16, torch.bfloat16):
        tables, ids, generator = make_inputs(case, dtype, optimizer)
        expected = copy_tables(tables)
        vectors = to_device(empty_vectors([t.weight for t in tables], ids))
        gradients = to_device(random_gradients(vectors, generator))
        kernels.update_all(tables, ids, gradients, optimizer)
        reference.update_all(expected, ids, gradients, optimizer)
        for actual, ref in zip(tables, expected, strict=True):
            assert_close(actual.weight, ref.weight, dtype)
            for state, ref_state in zip(actual.state, ref.state, strict=True):
                assert_close(state, ref_state, dtype if dtype == torch.float64 else torch.float32, scale=10.0)


def hot_case(dtype, optimizer, **id_options):
    """Tables with one row that hundreds of lookups read, and rows with a single lookup."""
    case = ([(50, 48), (9, 16)], [(0, "sum"), (0, "mean"), (1, "none")], True, True, 3)
    return make_inputs(case, dtype, optimizer, batch=200, max_length=6, hot=True, **id_options)


def test_hot_rows_are_summed_in_chunks_and_lookups_may_be_sorted_before():
    tables, ids, generator = hot_case(torch.float64, SGD(0.1))
    assert int((ids.values == 0).sum()) > 20 * kernels.row_kernels_triton.CHUNK_LOOKUPS.value
    gradients = to_device(random_gradients(to_device(empty_vectors([t.weight for t in tables], ids)), generator))
    expected, presorted = copy_tables(tables), copy_tables(tables)
    reference.update_all(expected, ids, gradients, SGD(0.1))
    kernels.update_all(tables, ids, gradients, SGD(0.1))
    kernels.update_all(presorted, ids, gradients, SGD(0.1), kernels.sort_lookups([t.weight for t in presorted], ids))
    for actual, ref, sorted_before in zip(tables, expected, presorted, strict=True):
        assert_close(actual.weight, ref.weight, torch.float64)
        assert torch.equal(actual.weight, sorted_before.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_equals_the_reference_bit_for_bit(dtype):
    """With one lookup per row the sums are equal, so the rounded results must be equal."""
    generator = torch.Generator().manual_seed(1)
    (table,) = make_tables(generator, [(64, 48)], dtype, SGD(0.1))
    table.weight[:8] *= 2.0**-14  # subnormal among them
    ids = make_ids(generator, [(0, "sum")], [64], batch=64, max_length=0)
    ids = replace(ids, values=torch.randperm(64, generator=generator), offsets=torch.arange(65))
    gradient = torch.randn(64, 48, generator=generator)
    gradient[5, 3:6] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    gradient[6], gradient[7] = 6.6e5, -torch.finfo(torch.float32).max
    (expected,) = copy_tables([table])
    reference.update_all([expected], ids, [gradient], SGD(0.1))  # on the CPU: the bits do not depend on the device
    table, ids, gradient = to_device(table), to_device(ids), to_device(gradient)
    kernels.update_all([table], ids, [gradient], SGD(0.1))
    actual = table.weight.cpu()
    assert torch.equal(actual.isnan(), expected.weight.isnan())
    assert torch.equal(
        actual.nan_to_num(0.0, posinf=None).view(torch.int16), expected.weight.nan_to_num(0.0).view(torch.int16)
    )
    assert int(table.weight.isinf().sum()) == 2  # finite values that overflow are clamped


def test_tables_of_several_dtypes_and_frozen_ones():
    generator = torch.Generator().manual_seed(4)
    optimizer = RowWiseAdaGrad(0.1)
    tables = [
        make_tables(generator, [(20, dim)], dtype, optimizer)[0]
        for dim, dtype in ((16, torch.float32), (33, torch.bfloat16), (8, torch.float32))
    ]
    tables[2] = replace(tables[2], is_trained=False)
    ids = make_ids(generator, [(0, "sum"), (1, "mean"), (2, "sum")], [20, 20, 20], batch=9)
    tables, ids = to_device(tables), to_device(ids)
    weights = [table.weight for table in tables]
    vectors, expected = to_device(empty_vectors(weights, ids)), to_device(empty_vectors(weights, ids))
    kernels.lookup_all(weights, ids, vectors)
    reference.lookup_all(weights, ids, expected)
    torch.testing.assert_close(vectors, expected)
    expected_tables, gradients = copy_tables(tables), to_device(random_gradients(vectors, generator))
    kernels.update_all(tables, ids, gradients, optimizer)
    reference.update_all(expected_tables, ids, gradients, optimizer)
    for actual, ref in zip(tables, expected_tables, strict=True):
        assert_close(actual.weight, ref.weight, actual.weight.dtype)
    assert torch.equal(tables[2].weight, weights[2])


@pytest.mark.parametrize("bad_id", [-1, 20, 2**40])
def test_ids_out_of_range_are_refused_by_name(bad_id):
    case = ([(20, 16)], [(0, "sum"), (0, "sum")], True, False, 5)
    tables, ids, generator = make_inputs(case, torch.float32, AdaGrad(0.1))
    ids.values[-1] = bad_id
    weights = [table.weight for table in tables]
    vectors = to_device(empty_vectors(weights, ids))
    for call in (
        lambda: kernels.lookup_all(weights, ids, vectors),
        lambda: kernels.update_all(tables, ids, vectors, AdaGrad(0.1)),
        lambda: kernels.id_weight_gradients_all(weights, ids, vectors, vectors[0][0]),
    ):
        before = [table.weight.clone() for table in tables]
        with pytest.raises(IdOutOfRange) as error:
            call()
        assert error.value.feature == 1 and error.value.id == bad_id
        assert all(torch.equal(table.weight, old_weight) for table, old_weight in zip(tables, before, strict=True))


def test_an_update_without_ids_changes_nothing():
    case = ([(20, 16)], [(0, "sum")], True, False, 6)
    tables, ids, generator = make_inputs(case, torch.float32, AdaGrad(0.1), max_length=0)
    before = tables[0].weight.clone()
    vectors = to_device(empty_vectors([before], ids))
    kernels.lookup_all([before], ids, vectors)
    assert vectors[0].shape == (7, 16) and not vectors[0].any()
    kernels.update_all(tables, ids, vectors, AdaGrad(0.1))
    assert torch.equal(tables[0].weight, before)


def test_the_operators_use_the_triton_kernels(monkeypatch):
    """As on a GPU: here the operators of kernels/embedding.py are patched to use the Triton kernels."""
    monkeypatch.setattr(embedding, "native_library", lambda: None)
    monkeypatch.setattr(embedding, "_triton_kernels_for", lambda ids: kernels)
    tables, ids, generator = hot_case(torch.float32, AdaGrad(0.1))
    expected_tables = copy_tables(tables)
    weights = [table.weight for table in tables]
    vectors, expected = embedding.lookup(weights, ids), to_device(empty_vectors(weights, ids))
    reference.lookup_all(weights, ids, expected)
    torch.testing.assert_close(vectors, expected)
    gradients = to_device(random_gradients(vectors, generator))
    embedding.update(tables, ids, gradients, AdaGrad(0.1), embedding.sort_lookups(weights, ids))
    reference.update_all(expected_tables, ids, gradients, AdaGrad(0.1))
    for actual, ref in zip(tables, expected_tables, strict=True):
        assert_close(actual.weight, ref.weight, torch.float32)


def test_the_compiler_accepts_the_kernels(tmp_path):
    """Compiled for a GPU that this machine does not need to have."""
    script = Path(__file__).parents[1] / "native" / "compile_triton.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count(" bytes") == 38
