"""16-bit tables and checkpoints at the limits of their range."""

import pytest
import torch

from shardwright.kernels.rounding import copy_finite
from shardwright.layers.embedding import EmbeddingBags
from shardwright.spec.workload import Feature, Table

EDGES = [65504.0, 65519.0, 65536.0, 1e30, -1e30, 1.0]


def test_a_conversion_keeps_finite_values_finite():
    values = torch.tensor([*EDGES, torch.inf, -torch.inf, torch.nan]).repeat(70_000, 1)
    converted = torch.empty(values.shape, dtype=torch.float16)
    copy_finite(converted, values)
    assert torch.equal(converted.isfinite(), values.isfinite())
    assert converted[69_999, :8].tolist() == [65504, 65504, 65504, 65504, -65504, 1, torch.inf, -torch.inf]
    scalar = torch.empty((), dtype=torch.float16)
    copy_finite(scalar, torch.tensor(1e6))
    assert scalar.item() == 65504
    widened = torch.empty_like(values)
    copy_finite(widened, converted)
    assert widened[0, 0] == 65504


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_a_table_held_in_16_bits_stays_finite(dtype):
    bags = EmbeddingBags([Table("t", 2, 3)], [Feature("a", "t")])
    with torch.no_grad():
        bags.weight("t").copy_(torch.tensor([[1e30, -1e30, torch.finfo(torch.float32).max], [1.0, 65536.0, -2.0]]))
    bags.hold({"t": dtype})
    assert bool(bags.weight("t").isfinite().all()) and bags.weight("t").dtype == getattr(torch, dtype)
