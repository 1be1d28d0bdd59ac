"""Activation bytes from describe() and peak bytes from the planner, compared with what torch allocates: all live
storages of a real step on the CPU, without activation checkpointing, with full and with selective checkpointing.
"""

import gc
from functools import partial

import pytest
import torch
from clicks import batch, dlrm
from test_planner import make_cluster
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
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
SAVED_OPS = {
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default),
    torch.ops.shardwright.grouped_linear.default,
}


class MixedBlock(nn.Module):
    """Products of every kind, elementwise operations, a norm and a shortcut; its last operation is not a product."""

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


class ProductBlock(nn.Module):
    """Its last operation is a product, whose output is the input of the next block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.second(self.first(x_BD).relu())


class AttentionBlock(nn.Module):
    """Self-attention over 8 positions, written by hand; `mask`: of which keys a query sees."""

    def __init__(self, width: int, mask: Tensor | None = None) -> None:
        super().__init__()
        self.mixed, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", mask)

    def forward(self, x_BD: Tensor) -> Tensor:
        parts = self.mixed(x_BD).view(2, 8, 3, 2, -1).permute(2, 0, 3, 1, 4)  # (query, key, value) of 2 x 2 heads
        query, key, value = parts
        if self.mask is None:
            y_BHLE = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            y_BHLE = functional.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=self.mask)
        return x_BD + self.back(y_BHLE.transpose(1, 2).reshape(x_BD.shape))


class EncoderBlock(nn.TransformerEncoderLayer):
    """PyTorch's own block, on 2 sequences of 8 positions."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 2, 2 * width, dropout=0.0, batch_first=True)

    def forward(self, x_BD: Tensor) -> Tensor:
        return super().forward(x_BD.view(2, 8, -1)).reshape(x_BD.shape)


class Stack(nn.Module):
    """Blocks on the numeric features of a batch; `run` calls a block, with or without checkpointing."""

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


class LiveStorages(TorchDispatchMode):
    """Tracks the storages that operations allocate, except those in `excluded`, and the peak of their live bytes."""

    def __init__(self, excluded: set[int]) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.excluded, self.peak = excluded, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                recorded = self.storages.get(reference.cdata)
                if reference.cdata not in self.excluded and (recorded is None or recorded[0].expired()):
                    self.storages[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.live_bytes())
        return result

    def live_bytes(self, excluded: int = 0) -> int:
        return sum(size for key, (ref, size) in self.storages.items() if key != excluded and not ref.expired())


def save_products(context, func, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if func in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_all(block, x):
    return checkpoint(block, x, use_reentrant=False)


def checkpoint_selective(block, x):
    contexts = partial(create_selective_checkpoint_contexts, save_products)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def measure_saved_bytes(model, batch_) -> int:
    """Live bytes after a forward pass, without parameters and loss, with the numeric features of the batch."""
    model(batch_)  # torch retains some storages from its first call on
    with LiveStorages({p.untyped_storage()._cdata for p in model.parameters()}) as storages:
        loss = model.loss(model(batch_), batch_)
    gc.collect()
    return storages.live_bytes(excluded=loss.untyped_storage()._cdata) + batch_.numbers.nbytes


STACKS = {
    "mixed": lambda **kwargs: Stack(MixedBlock(8), MixedBlock(8), MixedBlock(8), **kwargs),
    "ends in products": lambda **kwargs: Stack(ProductBlock(8), ProductBlock(8), **kwargs),
    "both": lambda **kwargs: Stack(ProductBlock(8), MixedBlock(8), ProductBlock(8), **kwargs),
    "attention": lambda **kwargs: Stack(AttentionBlock(8), AttentionBlock(8), **kwargs),
    "masked": lambda **kwargs: Stack(AttentionBlock(8, torch.ones(8, 8).tril().bool()), ProductBlock(8), **kwargs),
    "encoder": lambda **kwargs: Stack(EncoderBlock(8), EncoderBlock(8), **kwargs),
}


@pytest.mark.parametrize("stack", STACKS)
def test_described_activation_bytes_equal_the_bytes_torch_keeps(stack):
    batch_ = batch()
    blocks = describe(STACKS[stack](), batch_).blocks
    loss = sum(block.activation_bytes for block in blocks if block.name == "rest")
    activations = sum(block.activation_bytes for block in blocks)
    inputs = sum(block.input_bytes for block in blocks)
    products = sum(block.product_bytes for block in blocks)
    assert measure_saved_bytes(STACKS[stack](), batch_) == activations
    assert measure_saved_bytes(STACKS[stack](run=checkpoint_all), batch_) == inputs + loss
    assert measure_saved_bytes(STACKS[stack](run=checkpoint_selective), batch_) == inputs + products + loss
    assert inputs < inputs + products <= activations


def test_selective_checkpointing_saves_the_described_products():
    assert {func.overloadpacket.__name__ for func in SAVED_OPS} == SAVED_PRODUCT_OPS


def test_a_tensor_saved_by_two_blocks_counts_once():
    """A ReLU saves its output, and the product of the next block saves its input: the same tensor."""
    blocks = {block.name: block for block in describe(Stack(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), batch()).blocks}
    row = 16 * 8 * 4
    assert blocks["blocks.0"].activation_bytes == 2 * row  # its input and its output
    assert blocks["head"].activation_bytes == 0 and blocks["head"].input_bytes == row
    assert blocks["rest"].activation_bytes == 16 * 4  # the output of exp


def test_described_operations_equal_those_of_a_real_block():
    """As many as the dispatcher runs for a real block, except for up to two views that tracing adds."""
    blocks = {block.name: block for block in describe(Stack(MixedBlock(8)), batch()).blocks}

    class Counting(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num += 1
            return func(*args, **(kwargs or {}))

    real_block, x_BD = MixedBlock(8), torch.randn(16, 8, requires_grad=True)
    with Counting() as counting:
        real_block(x_BD)
    assert blocks["blocks.0"].forward_calls == pytest.approx(counting.num, abs=2) and counting.num > 15


def test_embedding_vectors_count_as_inputs_of_a_block():
    blocks = {block.name: block for block in describe(dlrm(), batch()).blocks}
    assert blocks["dense.bottom"].input_bytes == 16 * 4 * 4
    assert blocks["dense.interaction"].input_bytes > 0


class WideBlock(nn.Module):
    """Most of its memory is weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.norm = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.norm(x_BD + self.second(nn.functional.gelu(self.first(x_BD))))


@pytest.mark.parametrize("kind, width, size", [(WideBlock, 96, 32), (WideBlock, 64, 1024), (MixedBlock, 64, 128)])
def test_the_predicted_peak_equals_the_measured_one(kind, width, size):
    """On a single rank: weights, two moments, gradients as they are computed, and all tensors of a step."""
    batch_ = Batch(batch().features, torch.randn(size, 4), {})
    runs = {None: lambda block, x: block(x), "products": checkpoint_selective, "nothing": checkpoint_all}

    def model(run):
        return Stack(*(kind(width) for _ in range(6)), width=width, run=run)

    workload = describe(model(runs[None]), batch_)
    base_problem = search.define_problem(workload, make_cluster(), workload.batch_size, Precision())
    problems = {
        strategy.recompute_policy: dense_strategies.apply_strategy(base_problem, strategy)
        for strategy in dense_strategies.all_strategies(workload, make_cluster())
    }
    for policy, problem in problems.items():
        model_ = model(runs[policy])
        model_.loss(model_(batch_), batch_).backward()
        model_.zero_grad(set_to_none=True)
        parameters = sum(p.nbytes for p in model_.parameters())
        with LiveStorages({p.untyped_storage()._cdata for p in model_.parameters()}) as storages:
            model_.loss(model_(batch_), batch_).backward()
        peak = 3 * parameters + storages.peak + batch_.numbers.nbytes
        assert dense_model.total_bytes(dense_model.peak_memory(problem)) == pytest.approx(peak, rel=0.06), policy
    assert len(problems) > 1
