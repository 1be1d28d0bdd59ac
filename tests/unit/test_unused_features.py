"""Tables that the loss does not use in a step keep weights, optimizer state and step, as in torch."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from shardwright.jagged import Batch, Jagged, Vectors, concat, features_with_gradient
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.spec.optimizer import LAMB, SGD, AdaGrad, Adam, PartialRowWiseAdam, RowWiseAdaGrad
from shardwright.spec.workload import Feature, Table

ROWS, DIM, SAMPLES = 30, 4, 6


def ids(step: int, names: Sequence[str]) -> Jagged:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(names), SAMPLES), generator=generator)
    return Jagged(tuple(names), torch.randint(ROWS, (int(lengths.sum()),), generator=generator), lengths)


class TorchBags(nn.Module):
    """The same model with nn.EmbeddingBag, one module per table."""

    def __init__(self, like: EmbeddingBags, sparse: bool) -> None:
        super().__init__()
        self.features = like.features
        self.bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag.from_pretrained(
                    like.weight(table.name).detach().clone(), freeze=False, mode="sum", sparse=sparse
                )
                for table in like.tables
            }
        )

    def forward(self, batch: Jagged) -> dict[str, Tensor]:
        values = batch.values.split(batch.lengths.sum(1).tolist())
        return {
            feature.name: self.bags[feature.table](values[i], batch.lengths[i].cumsum(0) - batch.lengths[i])
            for i, feature in enumerate(self.features)
        }


def loss(vectors, used: Sequence[str]) -> Tensor:
    return torch.stack([((vectors[name] - 0.3) ** 2).sum() for name in used]).sum()


FEATURES = (Feature("a", "t"), Feature("b", "u"), Feature("c", "u"))
USED = (("a", "b", "c"), ("a",), ("a", "c"), ("b",), (), ("c", "a"))  # step after step


@pytest.mark.parametrize(
    "optimizer, torch_optimizer",
    [
        (Adam(0.05, eps=1e-15), lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.05, eps=1e-15)),
        (AdaGrad(0.1, eps=1e-10), lambda parameters: torch.optim.Adagrad(list(parameters), lr=0.1)),
        (SGD(0.1), lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    ],
    ids=lambda optimizer: getattr(optimizer, "kind", ""),
)
def test_unused_features_equal_embedding_bag_with_torch_optim(optimizer, torch_optimizer):
    """Torch gives a table without used features no gradient; all rows of used features are updated."""
    tables = [Table(name, ROWS, DIM, dtype="float64") for name in ("t", "u")]
    bags = EmbeddingBags(tables, FEATURES, optimizer)
    plain = TorchBags(bags, sparse=isinstance(optimizer, Adam))
    reference = torch_optimizer(plain.parameters())
    for step, used in enumerate(USED * 2):
        batch = ids(step, [feature.name for feature in FEATURES])
        reference.zero_grad(set_to_none=True)
        if used:
            loss(plain(batch), used).backward()
            loss(bags(batch), used).backward()
        else:
            (bags(batch)["a"] * 0.0).sum().backward()
        reference.step()
        for table in tables:
            torch.testing.assert_close(bags.weight(table.name), plain.bags[table.name].weight, rtol=0, atol=1e-12)
    assert bags.steps == {"t": 2 * 4, "u": 2 * 4}  # how often USED has "a", and "b" or "c"


OPTIMIZERS = (
    SGD(0.1, momentum=0.9, weight_decay=0.1),
    AdaGrad(0.1, weight_decay=0.1),
    RowWiseAdaGrad(0.1, weight_decay=0.1),
    Adam(0.01),
    Adam(0.01, weight_decay=0.1, decoupled=True),
    PartialRowWiseAdam(0.01, weight_decay=0.1),
    LAMB(0.01, weight_decay=0.1),
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
@pytest.mark.parametrize("pooling", ("sum", "none"))
def test_an_unused_tables_weights_and_state_do_not_change(optimizer, pooling):
    tables = [Table("t", ROWS, DIM), Table("u", ROWS, DIM)]
    bags = EmbeddingBags(tables, [Feature("a", "t"), Feature("b", "u", pooling)], optimizer)
    for step, used in enumerate((("a", "b"), ("a",), ("a",))):
        before = {name: value.clone() for name, value in (bags.state_dict() | bags.optimizer_state()).items()}
        loss(bags(ids(step, "ab")), used).backward()
        after = bags.state_dict() | bags.optimizer_state()
        names = {name for name, value in after.items() if not torch.equal(value, before[name])}
        assert any("t." in name for name in names) and ("b" in used) == any("u." in name for name in names)


def test_only_rows_of_used_features_are_updated():
    bags = EmbeddingBags(
        [Table("t", ROWS, DIM)], [Feature("a", "t"), Feature("b", "t", "none")], Adam(0.01, weight_decay=0.1)
    )
    batch = Jagged(("a", "b"), torch.tensor([1, 2, 2, 3, 4]), torch.tensor([[2, 1], [1, 1]]))
    before = bags.weight("t").detach().clone()
    vectors = bags(batch)
    vectors["a"][:1].sum().backward()  # rows 1 and 2: the row of sample 1, whose gradient is 0, is also updated
    updated_rows = (bags.weight("t") != before).any(1).nonzero().flatten().tolist()
    assert updated_rows == [1, 2]
    bags(batch)["b"].sum().backward()
    assert ((bags.weight("t") != before).any(1).nonzero().flatten().tolist()) == [1, 2, 3, 4]


def test_rows_with_zero_gradient_of_a_used_feature_are_updated():
    bags = EmbeddingBags([Table("t", ROWS, DIM)], [Feature("a", "t")], Adam(0.1))
    batch = Jagged(("a",), torch.tensor([1, 2]), torch.tensor([[1, 1]]))
    bags(batch)["a"].sum().backward()
    before = bags.weight("t").detach().clone()
    bags(batch)["a"][:1].sum().backward()
    assert not torch.equal(bags.weight("t")[2], before[2])  # its first moment is not zero


class MaskedSum(nn.Module):
    """Logits from vectors times numeric features: a column of zeros leaves that feature unused."""

    def forward(self, batch, vectors):
        return torch.stack([vectors[name].sum(1) for name in ("a", "b")], 1).mul(batch.dense).sum(1)


class Model(nn.Module):
    def __init__(self, optimizer) -> None:
        super().__init__()
        torch.manual_seed(5)
        tables = [Table(name, ROWS, DIM, dtype="float64") for name in ("t", "u")]
        self.sparse = EmbeddingBags(tables, FEATURES[:2], optimizer)
        self.dense = MaskedSum()
        self.loss = BinaryLoss()

    def forward(self, batch):
        return self.dense(batch, self.sparse(batch))


def masked_batches(num: int, parts: int = 1) -> list[Batch]:
    """Odd steps use only feature a; of an even step's micro-batches only the first uses both features."""
    batches = []
    for index in range(num * parts):
        uses_b = index % parts == 0 and index // parts % 2 == 0
        labels = {"click": (torch.arange(SAMPLES) % 2).double()}
        dense = torch.tensor([1.0, float(uses_b)], dtype=torch.float64).repeat(SAMPLES, 1)
        batches.append(Batch(ids(index, "ab"), dense, labels))
    return batches


def concat_batches(parts: Sequence[Batch]) -> Batch:
    return Batch(
        concat([part.features for part in parts]),
        torch.cat([part.dense for part in parts if part.dense is not None]),
        {"click": torch.cat([part.labels["click"] for part in parts])},
    )


@pytest.mark.parametrize("optimizer", (Adam(0.05), RowWiseAdaGrad(0.1, weight_decay=0.1)), ids=lambda o: o.kind)
@pytest.mark.parametrize("accumulate", (1, 2))
def test_the_runtime_equals_a_user_training_loop(optimizer, accumulate):
    parts = masked_batches(6, accumulate)
    batches = [concat_batches(parts[i : i + accumulate]) for i in range(0, len(parts), accumulate)]
    by_hand, by_runtime = Model(optimizer), Model(optimizer)
    for batch in batches:
        by_hand.loss(by_hand(batch), batch).backward()
    job = build(by_runtime, plan_for(by_runtime, batches[0]), accumulate=accumulate)
    for _ in job.run(parts):
        pass
    assert by_runtime.sparse.steps == by_hand.sparse.steps == {"t": 6, "u": 3}
    for table in ("t", "u"):
        torch.testing.assert_close(
            by_runtime.sparse.weight(table), by_hand.sparse.weight(table), rtol=0, atol=1e-12, msg=table
        )


def test_features_with_gradient():
    pooled = torch.zeros(20, 6)
    pooled[15, 3] = 1e-30
    sequence = torch.zeros(5, 2)
    vectors = Vectors(("a", "b", "c"), (2, 2, 2), pooled, {"s": sequence, "e": sequence[:0]})
    assert features_with_gradient(vectors) == {"b"}
    pooled[0, 5], sequence[4, 0] = float("nan"), -1.0
    assert features_with_gradient(vectors) == {"b", "c", "s"}
    assert features_with_gradient(Vectors((), (), torch.zeros(0, 0), {})) == set()


def test_an_update_looks_up_each_table_a_few_times(monkeypatch):
    """A scan of all tables for each table took longer than the update itself, with 100 tables."""
    names = [f"t{i}" for i in range(50)]
    bags = EmbeddingBags([Table(name, ROWS, DIM) for name in names], [Feature(name, name) for name in names], SGD(0.1))
    lookups: list[str] = []
    holder = EmbeddingBags.holder
    monkeypatch.setattr(EmbeddingBags, "holder", lambda self, name: lookups.append(name) or holder(self, name))
    vectors = bags(ids(0, names))
    vectors.pooled_BD.sum().backward()
    assert bags.steps["t0"] == 1 and len(lookups) <= 8 * len(names)
