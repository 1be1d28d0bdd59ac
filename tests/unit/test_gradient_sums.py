"""Gradients summed by row, as the update needs them: the compiled and the plain version, and errors."""

import pytest
import torch

from shardwright.kernels import gradient_sums
from shardwright.kernels.arguments import POOLINGS, IdOutOfRange, Ids
from shardwright.kernels.native import lengths_to_offsets


def draw_inputs(seed: int, dtype: torch.dtype, max_length: int) -> tuple[list[torch.Tensor], Ids, list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    rows, dims, batch = (1, 40, 3000, 7), (16, 24, 5, 64), 50
    weights = [torch.randn(num, dim, generator=rng).to(dtype) for num, dim in zip(rows, dims, strict=True)]
    tables, pooling = [1, 0, 2, 1, 2], [POOLINGS.index(name) for name in ("sum", "mean", "none", "sum", "sum")]
    lengths = torch.randint(0, max_length, (len(tables), batch), generator=rng)
    counts = lengths.sum(1).tolist()
    values = [torch.randint(0, rows[t], (num,), generator=rng) for t, num in zip(tables, counts, strict=True)]
    id_weights = torch.rand(sum(counts), generator=rng) if seed % 2 else None
    sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    pooled = torch.randn(batch, sum(dims[t] for t, p in zip(tables, pooling, strict=True) if p != 2), generator=rng)
    unpooled = torch.randn(counts[2], dims[2], generator=rng)
    ids = Ids(torch.cat(values), lengths_to_offsets(lengths), id_weights, tables, pooling)
    return weights, ids, [pooled.to(sum_dtype), unpooled.to(sum_dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("seed", "max_length"), [(0, 4), (1, 4), (2, 40), (3, 40), (4, 1)])
def test_sums_equal_dense_gradients(seed: int, max_length: int, dtype: torch.dtype) -> None:
    weights, ids, gradients = draw_inputs(seed, dtype, max_length)
    result = gradient_sums.sum_gradients(weights, ids, gradients)
    expected = [torch.zeros_like(weight, dtype=gradients[0].dtype) for weight in weights]
    gradient_sums.add_at_positions(ids, gradients, expected)
    table_ids = [
        torch.cat(
            [values for (values, _, _), table in zip(ids.split_by_feature(), ids.tables, strict=True) if table == t]
            or [ids.values[:0]]
        )
        for t in range(len(weights))
    ]
    assert result.counts == [len(values.unique()) for values in table_ids]
    rows_by_table = result.rows_U.split(result.counts)
    for full, rows, values, sums in zip(expected, rows_by_table, table_ids, result.sums, strict=True):
        assert torch.equal(rows, values.unique())
        assert torch.equal(sums, full[rows])


def test_plain_torch_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, ids, gradients = draw_inputs(5, torch.float64, 8)
    compiled = gradient_sums.sum_gradients(weights, ids, gradients)
    monkeypatch.setattr(gradient_sums, "native_library", lambda: None)
    plain = gradient_sums.sum_gradients(weights, ids, gradients)
    assert torch.equal(compiled.rows_U, plain.rows_U)
    assert compiled.counts == plain.counts
    assert all(torch.equal(a, b) for a, b in zip(compiled.sums, plain.sums, strict=True))


def test_errors_name_an_id_out_of_range() -> None:
    weights, ids, gradients = draw_inputs(6, torch.float32, 8)
    ids.values[-1] = 3000
    with pytest.raises(IdOutOfRange, match="id 3000"):
        gradient_sums.sum_gradients(weights, ids, gradients)
