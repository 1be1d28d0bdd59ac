"""describe() compared with the actual sizes of a model and with a real run under torch's FlopCounterMode."""

from dataclasses import replace

import pytest
import torch
from clicks import batch, dlrm
from test_models import tokens
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.measure.describe import describe
from shardwright.models.gpt import GPT
from shardwright.spec.workload import Product


class SharedLayerModel(nn.Module):
    """A user's model: no tables, a layer that is called twice, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.shared = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.unused = nn.Linear(7, 7)
        self.loss = lambda logits, batch: ((logits.squeeze(1) - batch.labels["click"]) ** 2).mean()

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.shared(self.shared(self.first(batch.dense))).mean(1, keepdim=True)


CPU_ATTENTION = {  # PyTorch's formulas of its other fused kernels, for the one of CPUs
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}
CASES = {
    "dlrm": (dlrm, batch),
    "gpt": (lambda: GPT(vocabulary=20, context=8, channels=16, num_blocks=2, num_heads=2), tokens),
    "own": (SharedLayerModel, batch),
}


@pytest.mark.parametrize("name", CASES)
def test_total_sizes_and_flops_are_exact(name):
    make, data = CASES[name]
    model, batch_ = make(), data()
    workload = describe(model, batch_)
    sparse = getattr(model, "sparse", None)
    dense = [p for n, p in model.named_parameters() if not n.startswith("sparse.")]
    assert workload.dense_parameters == sum(p.numel() for p in dense)
    assert workload.dense_bytes == sum(p.numel() * p.element_size() for p in dense)
    assert workload.table_bytes == (sum(p.nbytes for p in sparse.parameters()) if sparse else 0)
    assert workload.state_bytes == (sum(b.nbytes for b in sparse.buffers()) if sparse else 0)
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as forward:
        loss = model.loss(model(batch_), batch_)
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as backward:
        loss.backward()
    assert sum(block.forward_flops for block in workload.blocks) == forward.get_total_flops() > 0
    assert sum(block.backward_flops for block in workload.blocks) == backward.get_total_flops() > 0
    workload.verify()


def test_activation_bytes_of_a_block_are_the_bytes_autograd_saves():
    model, batch_ = dlrm(), batch()
    blocks = {block.name: block for block in describe(model, batch_).blocks}
    # bottom: its input (16 x 4), and the outputs of its two ReLUs (16 x 16, 16 x 8), all float32
    assert blocks["dense.bottom"].activation_bytes == 16 * (4 + 16 + 8) * 4


class ConcatProduct(torch.nn.Module):
    """A product with two concatenated inputs, without child modules that could be counted separately."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6, 3))

    def forward(self, batch):
        return torch.cat([batch.numbers, batch.numbers[:, :2]], 1) @ self.weight

    def loss(self, logits, batch):
        return logits.sum()


def test_products_are_described_by_shape_and_other_operations_by_bytes():
    batch_ = batch()
    (rest,) = describe(ConcatProduct(), batch_).blocks
    assert rest.forward_products == (Product(16, 6, 3, 1, "m"),)
    assert rest.backward_products == (Product(6, 16, 3, 1, "k"),)
    # cat reads 4 and 2 columns and writes 6; the sum reads 3 and writes a number
    assert rest.forward_bytes == 16 * (4 + 2 + 6) * 4 + 16 * 3 * 4 + 4
    assert sum(product.flops for product in rest.forward_products) == rest.forward_flops


class EqualShapes(torch.nn.Module):
    """Two children whose products have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, batch):
        return self.second(self.first(batch.numbers))

    def loss(self, logits, batch):
        return logits.sum()


def test_no_product_is_counted_twice():
    for direction in ("forward", "backward"):
        blocks = describe(EqualShapes(), batch()).blocks
        products = [product for block in blocks for product in getattr(block, f"{direction}_products")]
        flops = sum(getattr(block, f"{direction}_flops") for block in blocks)
        assert sum(product.flops for product in products) == flops


def test_statistics_come_from_the_batch():
    batch_ = batch()
    statistics = {entry.feature: entry for entry in describe(dlrm(), batch_).statistics}
    site = batch_.features.values[: int(batch_.features.lengths[0].sum())]
    assert statistics["site"].ids_per_sample == site.numel() / 16
    assert statistics["site"].distinct_share == site.unique().numel() / site.numel()


def test_describe_allocates_nothing_and_leaves_the_model_unchanged():
    with torch.device("meta"):
        model = GPT(vocabulary=50_000, context=4, channels=4096, num_blocks=1, num_heads=1)
    before = dict(model.named_parameters())
    batch_ = tokens(1, 4)
    assert describe(model, batch_).dense_parameters > 400_000_000
    assert all(parameter is before[name] and parameter.is_meta for name, parameter in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("forward", "remedy"),
    [
        (lambda x: x if x.sum() > 0 else 2 * x, "write torch.where(condition, a, b)"),
        (lambda x: x * x.sum().item(), "write torch.where(condition, a, b)"),
        (lambda x: x + float(x.detach().numpy().sum()), "write torch.where(condition, a, b)"),
        (lambda x: x + x[x > 0].sum(), "write torch.where(mask, x, 0)"),
        (lambda x: x + x.unique().sum(), "compute it in the data source"),
        (lambda x: x + x.repeat_interleave(x.long().flatten()).sum(), "output_size=..."),
        (lambda x: x + torch.ones(4), "device=x.device"),
        (lambda x: x @ x, "change that line"),
    ],
)
def test_an_untraceable_model_is_refused_with_the_line_and_a_remedy(forward, remedy):
    class Untraceable(SharedLayerModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            return super().forward(replace(batch, dense=forward(batch.dense)))

    with pytest.raises(UserError) as error:
        describe(Untraceable(), batch())
    message = str(error.value)
    assert message.startswith("Untraceable cannot be traced on the meta device") and "\n" not in message
    assert f"{__file__}:" in message and remedy in message and "or give the model a method describe(batch" in message


def test_blocks_called_with_keywords_are_counted():
    class Keywords(SharedLayerModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            return self.shared(input=self.first(input=batch.dense)).mean(1, keepdim=True)

    flops = {block.name: block.forward_flops for block in describe(Keywords(), batch()).blocks}
    assert flops["first"] == 2 * 16 * 4 * 32 and flops["shared"] == 2 * 16 * 32 * 32


def test_tables_of_float64_are_traced_in_float64():
    workload = describe(dlrm(dtype="float64"), batch(dtype=torch.float64))
    assert {table.dtype for table in workload.tables} == {"float64"}


def test_a_model_may_describe_itself():
    class DescribesItself(SharedLayerModel):
        def describe(self, batch, statistics):
            return "own description"

    assert describe(DescribesItself(), batch()) == "own description"


def test_a_torch_embedding_bag_as_tables_is_refused():
    class TorchTables(SharedLayerModel):
        def __init__(self) -> None:
            super().__init__()
            self.sparse = nn.EmbeddingBag(3, 3)

    with pytest.raises(UserError, match="TorchTables.sparse is a EmbeddingBag; wanted EmbeddingBags"):
        describe(TorchTables(), batch())
