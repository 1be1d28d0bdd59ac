"""Gradients summed by row: those of the update, compiled and plain, and what is refused."""

import pytest
import torch

from shardwright.kernels import gradient_sums
from shardwright.kernels.arguments import POOLINGS, IdOutOfRange, Ids
from shardwright.kernels.native import lengths_to_offsets


def drawn(seed: int, dtype: torch.dtype, most: int) -> tuple[list[torch.Tensor], Ids, list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    rows, dims, batch = (1, 40, 3000, 7), (16, 24, 5, 64), 50
    weights = [torch.randn(num, dim, generator=draw).to(dtype) for num, dim in zip(rows, dims, strict=True)]
    tables, pooling = [1, 0, 2, 1, 2], [POOLINGS.index(one) for one in ("sum", "mean", "none", "sum", "sum")]
    lengths = torch.randint(0, most, (len(tables), batch), generator=draw)
    each = lengths.sum(1).tolist()
    values = [torch.randint(0, rows[t], (num,), generator=draw) for t, num in zip(tables, each, strict=True)]
    id_weights = torch.rand(sum(each), generator=draw) if seed % 2 else None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pooled = torch.randn(batch, sum(dims[t] for t, p in zip(tables, pooling, strict=True) if p != 2), generator=draw)
    alone = torch.randn(each[2], dims[2], generator=draw)
    ids = Ids(torch.cat(values), lengths_to_offsets(lengths), id_weights, tables, pooling)
    return weights, ids, [pooled.to(wide), alone.to(wide)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("seed", "most"), [(0, 4), (1, 4), (2, 40), (3, 40), (4, 1)])
def test_the_sums_of_an_update(seed: int, most: int, dtype: torch.dtype) -> None:
    weights, ids, gradients = drawn(seed, dtype, most)
    found = gradient_sums.sum_gradients(weights, ids, gradients)
    zeros = [torch.zeros_like(weight, dtype=gradients[0].dtype) for weight in weights]
    gradient_sums.add_at_positions(ids, gradients, zeros)
    touched = [
        torch.cat(
            [values for (values, _, _), table in zip(ids.split_by_feature(), ids.tables, strict=True) if table == t]
            or [ids.values[:0]]
        )
        for t in range(len(weights))
    ]
    assert found.counts == [len(one.unique()) for one in touched]
    for zero, rows, named, summed in zip(zeros, found.rows_U.split(found.counts), touched, found.sums, strict=True):
        assert torch.equal(rows, named.unique())
        assert torch.equal(summed, zero[rows])


def test_plain_torch_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, ids, gradients = drawn(5, torch.float64, 8)
    found = gradient_sums.sum_gradients(weights, ids, gradients)
    monkeypatch.setattr(gradient_sums, "native_library", lambda: None)
    plain = gradient_sums.sum_gradients(weights, ids, gradients)
    assert torch.equal(found.rows_U, plain.rows_U)
    assert found.counts == plain.counts
    assert all(torch.equal(a, b) for a, b in zip(found.sums, plain.sums, strict=True))


def test_an_id_outside_is_named() -> None:
    weights, ids, gradients = drawn(6, torch.float32, 8)
    ids.values[-1] = 3000
    with pytest.raises(IdOutOfRange, match="id 3000"):
        gradient_sums.sum_gradients(weights, ids, gradients)
