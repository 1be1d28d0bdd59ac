"""What describe says stays from forward to backward, and the planner is there at most, against what torch keeps: every
storage of a real step on the CPU that is alive, with blocks as they are, recomputed whole, and all but their products.
"""

import gc
from functools import partial

import pytest
import torch
from clicks import batch, dlrm
from test_planner import cluster
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.jagged import Batch
from shardwright.measure.describe import describe
from shardwright.measure.op_counts import SAVED_PRODUCT_OPS
from shardwright.planner import dense_strategies, search
from shardwright.planner.memory import dense_model
from shardwright.planner.problem import Precision

aten = torch.ops.aten
SAVED = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default}


class Mixed(nn.Module):
    """Products of every kind, what is between them, a norm and a shortcut; ends in no product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)
        self.convolution, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.LayerNorm(width)

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD = self.second(torch.tanh(self.first(x_BD)))
        z_B2D = self.convolution(y_BD.unsqueeze(1)).relu()
        a_BDD = torch.bmm(z_B2D.transpose(1, 2), z_B2D).softmax(2)
        w_B1D = torch.baddbmm(x_BD.unsqueeze(1), y_BD.unsqueeze(1), a_BDD)
        return self.norm(w_B1D.squeeze(1) * x_BD.sigmoid())


class Ends(nn.Module):
    """Ends in a product, which the next block is called with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.second(self.first(x_BD).relu())


class Stack(nn.Module):
    """Blocks as they are or recomputed, on numbers of the batch."""

    def __init__(self, *blocks: nn.Module, width: int = 8, run=lambda block, x: block(x)) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(4, width), nn.ModuleList(blocks), nn.Linear(width, 1)
        self.run = run

    def forward(self, batch):
        x_BD = self.run(self.embed, batch.numbers)
        for block in self.blocks:
            x_BD = self.run(block, x_BD)
        return self.run(self.head, x_BD)

    def loss(self, logits, batch):
        return logits.exp().sum()


class Alive(TorchDispatchMode):
    """Every storage that operations gave."""

    def __init__(self, but: set[int]) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}
        self.but, self.most = but, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                known = self.found.get(reference.cdata)
                if reference.cdata not in self.but and (known is None or known[0].expired()):
                    self.found[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        self.most = max(self.most, self.bytes_())
        return given

    def bytes_(self, but: int = 0) -> int:
        return sum(size for at, (one, size) in self.found.items() if at != but and not one.expired())


def policy(context, func, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if func in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def whole(block, x):
    return checkpoint(block, x, use_reentrant=False)


def selective(block, x):
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def kept(model, one) -> int:
    """Behind a forward pass, but parameters and loss; with the numbers of the batch, which were there before."""
    model(one)  # what torch keeps from its first call on
    with Alive({p.untyped_storage()._cdata for p in model.parameters()}) as alive:
        loss = model.loss(model(one), one)
    gc.collect()
    return alive.bytes_(but=loss.untyped_storage()._cdata) + one.numbers.nbytes


STACKS = {
    "mixed": lambda **how: Stack(Mixed(8), Mixed(8), Mixed(8), **how),
    "ends in products": lambda **how: Stack(Ends(8), Ends(8), **how),
    "both": lambda **how: Stack(Ends(8), Mixed(8), Ends(8), **how),
}


@pytest.mark.parametrize("stack", STACKS)
def test_what_is_kept_is_what_torch_keeps(stack):
    one = batch()
    blocks = describe(STACKS[stack](), one).blocks
    loss = sum(block.activation_bytes for block in blocks if block.name == "rest")
    as_they_are = sum(block.activation_bytes for block in blocks)
    inputs = sum(block.input_bytes for block in blocks)
    products = sum(block.product_bytes for block in blocks)
    assert kept(STACKS[stack](), one) == as_they_are
    assert kept(STACKS[stack](run=whole), one) == inputs + loss
    assert kept(STACKS[stack](run=selective), one) == inputs + products + loss
    assert inputs < inputs + products <= as_they_are


def test_products_that_are_kept_are_those_of_the_policy():
    assert {func.overloadpacket.__name__ for func in SAVED} == SAVED_PRODUCT_OPS


def test_a_tensor_that_two_blocks_keep_counts_once():
    """A ReLU keeps what it gives, and the product of the next block what it is called with: the same."""
    blocks = {block.name: block for block in describe(Stack(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), batch()).blocks}
    row = 16 * 8 * 4
    assert blocks["blocks.0"].activation_bytes == 2 * row  # its input and its output
    assert blocks["head"].activation_bytes == 0 and blocks["head"].input_bytes == row
    assert blocks["rest"].activation_bytes == 16 * 4  # what exp gives


def test_operations_are_counted():
    """As many as the dispatcher sees of a real block, but for a view or two that tracing adds."""
    blocks = {block.name: block for block in describe(Stack(Mixed(8)), batch()).blocks}

    class Counting(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num += 1
            return func(*args, **(kwargs or {}))

    real, x_BD = Mixed(8), torch.randn(16, 8, requires_grad=True)
    with Counting() as counting:
        real(x_BD)
    assert blocks["blocks.0"].forward_calls == pytest.approx(counting.num, abs=2) and counting.num > 15


def test_vectors_count_among_what_a_block_is_called_with():
    blocks = {block.name: block for block in describe(dlrm(), batch()).blocks}
    assert blocks["dense.bottom"].input_bytes == 16 * 4 * 4
    assert blocks["dense.interaction"].input_bytes > 0


class Wide(nn.Module):
    """Weights are most of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.norm = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.norm(x_BD + self.second(nn.functional.gelu(self.first(x_BD))))


@pytest.mark.parametrize("kind, width, size", [(Wide, 96, 32), (Wide, 64, 1024), (Mixed, 64, 128)])
def test_the_fullest_moment_is_as_full_as_measured(kind, width, size):
    """Of a rank alone: weights, two moments, gradients as they come, and all that a step makes."""
    one = Batch(batch().features, torch.randn(size, 4), {})
    made = {None: lambda block, x: block(x), "products": selective, "nothing": whole}

    def model(run):
        return Stack(*(kind(width) for _ in range(6)), width=width, run=run)

    described = describe(model(made[None]), one)
    posed = search.define_problem(described, cluster(), described.batch_size, Precision())
    found = {
        way.recompute_policy: dense_strategies.apply_strategy(posed, way)
        for way in dense_strategies.all_strategies(described, cluster())
    }
    for kept, problem in found.items():
        real = model(made[kept])
        real.loss(real(one), one).backward()
        real.zero_grad(set_to_none=True)
        parameters = sum(p.nbytes for p in real.parameters())
        with Alive({p.untyped_storage()._cdata for p in real.parameters()}) as alive:
            real.loss(real(one), one).backward()
        measured = 3 * parameters + alive.most + one.numbers.nbytes
        assert dense_model.total_bytes(dense_model.peak_memory(problem)) == pytest.approx(measured, rel=0.06), kept
    assert len(found) > 1
