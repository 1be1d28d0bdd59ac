"""Tables and checkpoints in 16 bits at the limits of their range."""

import pytest
import torch

from shardwright.kernels.rounding import copy_finite
from shardwright.layers.embedding import EmbeddingBags
from shardwright.spec.workload import Feature, Table

EDGES = [65504.0, 65519.0, 65536.0, 1e30, -1e30, 1.0]


def test_a_conversion_keeps_finite_values_finite():
    values = torch.tensor([*EDGES, torch.inf, -torch.inf, torch.nan]).repeat(70_000, 1)
    into = torch.empty(values.shape, dtype=torch.float16)
    copy_finite(into, values)
    assert torch.equal(into.isfinite(), values.isfinite())
    assert into[69_999, :8].tolist() == [65504, 65504, 65504, 65504, -65504, 1, torch.inf, -torch.inf]
    number = torch.empty((), dtype=torch.float16)
    copy_finite(number, torch.tensor(1e6))
    assert number.item() == 65504
    back = torch.empty_like(values)
    copy_finite(back, into)
    assert back[0, 0] == 65504


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_a_table_held_in_16_bits_stays_finite(dtype):
    bags = EmbeddingBags([Table("t", 2, 3)], [Feature("a", "t")])
    with torch.no_grad():
        bags.weight("t").copy_(torch.tensor([[1e30, -1e30, torch.finfo(torch.float32).max], [1.0, 65536.0, -2.0]]))
    bags.hold({"t": dtype})
    assert bool(bags.weight("t").isfinite().all()) and bags.weight("t").dtype == getattr(torch, dtype)
