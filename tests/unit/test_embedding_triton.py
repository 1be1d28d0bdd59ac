"""The Triton kernels against the reference: on a GPU where there is one, in Triton's interpreter elsewhere."""

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
    cases,
    close,
    copied,
    gradients_like,
    some_ids,
    some_tables,
)

from shardwright.kernels import embedding, reference
from shardwright.kernels.arguments import IdOutOfRange, empty_vectors
from shardwright.spec.optimizer import SGD, AdaGrad, RowWiseAdaGrad

pytest.importorskip("triton", reason="needs triton: pip install shardwright[gpu]")
kernels = import_module("shardwright.kernels.embedding_triton")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on(device, thing):
    if isinstance(thing, torch.Tensor):
        return thing.to(device)
    if isinstance(thing, list):
        return [on(device, one) for one in thing]
    names = ("values", "offsets", "weights") if hasattr(thing, "values") else ("weight", "state")
    return replace(thing, **{name: on(device, value) for name in names if (value := getattr(thing, name)) is not None})


def drawn(case, dtype, optimizer=None, **asked):
    shapes, features, wide, weighted, seed = case
    generator = torch.Generator().manual_seed(seed)
    tables = some_tables(generator, shapes, dtype, optimizer)
    weights = torch.float32 if weighted else None
    ids = some_ids(generator, features, [shape[0] for shape in shapes], wide=wide, weighted=weights, **asked)
    return on(DEVICE, tables), on(DEVICE, ids), generator


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=5)
@given(case=cases())
def test_lookup_is_the_reference(dtype, case):
    tables, ids, generator = drawn(case, dtype)
    found, expected = empty_vectors(tables, ids), empty_vectors(tables, ids)
    found, expected = on(DEVICE, found), on(DEVICE, expected)
    kernels.lookup_all(tables, ids, found)
    reference.lookup_all(tables, ids, expected)
    for mine, theirs in zip(found, expected, strict=True):
        close(mine, theirs, dtype)
    gradients = on(DEVICE, gradients_like(expected, generator))
    mine, theirs = (torch.empty(ids.values.numel(), dtype=expected[0].dtype, device=DEVICE) for _ in range(2))
    kernels.id_weight_gradients_all(tables, ids, gradients, mine)
    reference.id_weight_gradients_all(tables, ids, gradients, theirs)
    close(mine, theirs, dtype, scale=10.0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@settings(max_examples=3)
@given(case=cases())
def test_update_is_the_reference(optimizer, case):
    for dtype in (torch.float64, torch.float32) if case[-1] % 2 else (torch.float16, torch.bfloat16):
        tables, ids, generator = drawn(case, dtype, optimizer)
        theirs = copied(tables)
        vectors = on(DEVICE, empty_vectors([one.weight for one in tables], ids))
        gradients = on(DEVICE, gradients_like(vectors, generator))
        kernels.update_all(tables, ids, gradients, optimizer)
        reference.update_all(theirs, ids, gradients, optimizer)
        for mine, other in zip(tables, theirs, strict=True):
            close(mine.weight, other.weight, dtype)
            for one, state in zip(mine.state, other.state, strict=True):
                close(one, state, dtype if dtype == torch.float64 else torch.float32, scale=10.0)


def hot_case(dtype, optimizer, **asked):
    """A row that hundreds of lookups touch, beside rows of one."""
    case = ([(50, 48), (9, 16)], [(0, "sum"), (0, "mean"), (1, "none")], True, True, 3)
    return drawn(case, dtype, optimizer, batch=200, longest=6, hot=True, **asked)


def test_hot_rows_are_summed_in_chunks_and_the_order_may_be_made_before():
    tables, ids, generator = hot_case(torch.float64, SGD(0.1))
    assert int((ids.values == 0).sum()) > 20 * kernels.row_kernels_triton.CHUNK_LOOKUPS.value
    gradients = on(DEVICE, gradients_like(on(DEVICE, empty_vectors([one.weight for one in tables], ids)), generator))
    theirs, again = copied(tables), copied(tables)
    reference.update_all(theirs, ids, gradients, SGD(0.1))
    kernels.update_all(tables, ids, gradients, SGD(0.1))
    kernels.update_all(again, ids, gradients, SGD(0.1), kernels.sort_lookups([one.weight for one in again], ids))
    for mine, other, once_more in zip(tables, theirs, again, strict=True):
        close(mine.weight, other.weight, torch.float64)
        assert torch.equal(mine.weight, once_more.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_is_the_reference_to_the_bit(dtype):
    """One lookup a row, so that no sums differ: what is rounded is equal, and so must be the result."""
    generator = torch.Generator().manual_seed(1)
    (table,) = some_tables(generator, [(64, 48)], dtype, SGD(0.1))
    table.weight[:8] *= 2.0**-14  # subnormal among them
    ids = some_ids(generator, [(0, "sum")], [64], batch=64, longest=0)
    ids = replace(ids, values=torch.randperm(64, generator=generator), offsets=torch.arange(65))
    gradient = torch.randn(64, 48, generator=generator)
    gradient[5, 3:6] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    gradient[6], gradient[7] = 6.6e5, -torch.finfo(torch.float32).max
    table, ids, gradient = on(DEVICE, table), on(DEVICE, ids), on(DEVICE, gradient)
    (theirs,) = copied([table])
    kernels.update_all([table], ids, [gradient], SGD(0.1))
    reference.update_all([theirs], ids, [gradient], SGD(0.1))
    assert torch.equal(table.weight.view(torch.int16), theirs.weight.view(torch.int16))
    assert int(table.weight.isinf().sum()) == 2  # what overflows is clamped


def test_tables_of_several_dtypes_and_frozen_ones():
    generator = torch.Generator().manual_seed(4)
    optimizer = RowWiseAdaGrad(0.1)
    tables = [
        some_tables(generator, [(20, dim)], dtype, optimizer)[0]
        for dim, dtype in ((16, torch.float32), (33, torch.bfloat16), (8, torch.float32))
    ]
    tables[2] = replace(tables[2], is_trained=False)
    ids = some_ids(generator, [(0, "sum"), (1, "mean"), (2, "sum")], [20, 20, 20], batch=9)
    tables, ids = on(DEVICE, tables), on(DEVICE, ids)
    weights = [one.weight for one in tables]
    found, expected = on(DEVICE, empty_vectors(weights, ids)), on(DEVICE, empty_vectors(weights, ids))
    kernels.lookup_all(weights, ids, found)
    reference.lookup_all(weights, ids, expected)
    torch.testing.assert_close(found, expected)
    theirs, gradients = copied(tables), on(DEVICE, gradients_like(found, generator))
    kernels.update_all(tables, ids, gradients, optimizer)
    reference.update_all(theirs, ids, gradients, optimizer)
    for mine, other in zip(tables, theirs, strict=True):
        close(mine.weight, other.weight, mine.weight.dtype)
    assert torch.equal(tables[2].weight, weights[2])


@pytest.mark.parametrize("bad", [-1, 20, 2**40])
def test_ids_outside_are_named(bad):
    tables, ids, generator = drawn(([(20, 16)], [(0, "sum"), (0, "sum")], True, False, 5), torch.float32, AdaGrad(0.1))
    ids.values[-1] = bad
    weights = [one.weight for one in tables]
    vectors = on(DEVICE, empty_vectors(weights, ids))
    for call in (
        lambda: kernels.lookup_all(weights, ids, vectors),
        lambda: kernels.update_all(tables, ids, vectors, AdaGrad(0.1)),
        lambda: kernels.id_weight_gradients_all(weights, ids, vectors, vectors[0][0]),
    ):
        before = [one.weight.clone() for one in tables]
        with pytest.raises(IdOutOfRange) as told:
            call()
        assert told.value.feature == 1 and told.value.id == bad
        assert all(torch.equal(one.weight, old) for one, old in zip(tables, before, strict=True))


def test_nothing_looked_up_changes_nothing():
    tables, ids, generator = drawn(([(20, 16)], [(0, "sum")], True, False, 6), torch.float32, AdaGrad(0.1), longest=0)
    before = tables[0].weight.clone()
    vectors = on(DEVICE, empty_vectors([before], ids))
    kernels.lookup_all([before], ids, vectors)
    assert vectors[0].shape == (7, 16) and not vectors[0].any()
    kernels.update_all(tables, ids, vectors, AdaGrad(0.1))
    assert torch.equal(tables[0].weight, before)


def test_the_operators_use_them(monkeypatch):
    """As on a GPU: the operators of kernels/embedding.py, here made to take these kernels."""
    monkeypatch.setattr(embedding, "native_library", lambda: None)
    monkeypatch.setattr(embedding, "_triton_kernels_for", lambda ids: kernels)
    tables, ids, generator = hot_case(torch.float32, AdaGrad(0.1))
    theirs = copied(tables)
    weights = [one.weight for one in tables]
    vectors, expected = embedding.lookup(weights, ids), on(DEVICE, empty_vectors(weights, ids))
    reference.lookup_all(weights, ids, expected)
    torch.testing.assert_close(vectors, expected)
    gradients = gradients_like(vectors, generator)
    embedding.update(tables, ids, gradients, AdaGrad(0.1), embedding.sort_lookups(weights, ids))
    reference.update_all(theirs, ids, gradients, AdaGrad(0.1))
    for mine, other in zip(tables, theirs, strict=True):
        close(mine.weight, other.weight, torch.float32)


def test_the_compiler_takes_what_the_interpreter_takes(tmp_path):
    """For a GPU that need not be here."""
    script = Path(__file__).parents[1] / "native" / "compile_triton.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(" bytes") == 25
