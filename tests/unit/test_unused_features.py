"""Tables that the loss does not use in a step keep their weights, optimizer state and step count, as in torch."""

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
    draws = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(names), SAMPLES), generator=draws)
    return Jagged(tuple(names), torch.randint(ROWS, (int(lengths.sum()),), generator=draws), lengths)


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
            feature.name: self.bags[feature.table](values[at], batch.lengths[at].cumsum(0) - batch.lengths[at])
            for at, feature in enumerate(self.features)
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
    ids=lambda one: getattr(one, "kind", ""),
)
def test_unused_features_equal_embedding_bag_with_torch_optim(optimizer, torch_optimizer):
    """A table no used feature reads gets no gradient at all from torch; rows of used features all step."""
    tables = [Table(name, ROWS, DIM, dtype="float64") for name in ("t", "u")]
    bags = EmbeddingBags(tables, FEATURES, optimizer)
    plain = TorchBags(bags, sparse=isinstance(optimizer, Adam))
    rival = torch_optimizer(plain.parameters())
    for step, used in enumerate(USED * 2):
        batch = ids(step, [feature.name for feature in FEATURES])
        rival.zero_grad(set_to_none=True)
        if used:
            loss(plain(batch), used).backward()
            loss(bags(batch), used).backward()
        else:
            (bags(batch)["a"] * 0.0).sum().backward()
        rival.step()
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.kind)
@pytest.mark.parametrize("pooling", ("sum", "none"))
def test_nothing_of_an_unused_table_changes(optimizer, pooling):
    tables = [Table("t", ROWS, DIM), Table("u", ROWS, DIM)]
    bags = EmbeddingBags(tables, [Feature("a", "t"), Feature("b", "u", pooling)], optimizer)
    for step, used in enumerate((("a", "b"), ("a",), ("a",))):
        before = {name: value.clone() for name, value in (bags.state_dict() | bags.optimizer_state()).items()}
        loss(bags(ids(step, "ab")), used).backward()
        after = bags.state_dict() | bags.optimizer_state()
        changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
        assert any("t." in name for name in changed) and ("b" in used) == any("u." in name for name in changed)


def test_a_table_read_by_a_used_and_an_unused_feature_steps_the_rows_of_the_used_one():
    bags = EmbeddingBags(
        [Table("t", ROWS, DIM)], [Feature("a", "t"), Feature("b", "t", "none")], Adam(0.01, weight_decay=0.1)
    )
    batch = Jagged(("a", "b"), torch.tensor([1, 2, 2, 3, 4]), torch.tensor([[2, 1], [1, 1]]))
    before = bags.weight("t").detach().clone()
    vectors = bags(batch)
    vectors["a"][:1].sum().backward()  # rows 1 and 2; sample 1 has gradient 0, and its row steps all the same
    changed = (bags.weight("t") != before).any(1).nonzero().flatten().tolist()
    assert changed == [1, 2]
    bags(batch)["b"].sum().backward()
    assert ((bags.weight("t") != before).any(1).nonzero().flatten().tolist()) == [1, 2, 3, 4]


def test_rows_of_a_used_feature_step_where_their_gradient_is_zero():
    bags = EmbeddingBags([Table("t", ROWS, DIM)], [Feature("a", "t")], Adam(0.1))
    batch = Jagged(("a",), torch.tensor([1, 2]), torch.tensor([[1, 1]]))
    bags(batch)["a"].sum().backward()
    before = bags.weight("t").detach().clone()
    bags(batch)["a"][:1].sum().backward()
    assert not torch.equal(bags.weight("t")[2], before[2])  # its first moment is not zero


class Masked(nn.Module):
    """Logits from vectors that the numeric features multiply: a column of zeros leaves that feature unused."""

    def forward(self, batch, vectors):
        return torch.stack([vectors[name].sum(1) for name in ("a", "b")], 1).mul(batch.dense).sum(1)


class Model(nn.Module):
    def __init__(self, optimizer) -> None:
        super().__init__()
        torch.manual_seed(5)
        tables = [Table(name, ROWS, DIM, dtype="float64") for name in ("t", "u")]
        self.sparse = EmbeddingBags(tables, FEATURES[:2], optimizer)
        self.dense = Masked()
        self.loss = BinaryLoss()

    def forward(self, batch):
        return self.dense(batch, self.sparse(batch))


def masked_batches(num: int, parts: int = 1) -> list[Batch]:
    """Steps alternate between both features and only the first; with micro-batches only the first uses both."""
    found = []
    for at in range(num * parts):
        both = at % parts == 0 and at // parts % 2 == 0
        labels = {"click": (torch.arange(SAMPLES) % 2).double()}
        dense = torch.tensor([1.0, float(both)], dtype=torch.float64).repeat(SAMPLES, 1)
        found.append(Batch(ids(at, "ab"), dense, labels))
    return found


def together(parts: Sequence[Batch]) -> Batch:
    return Batch(
        concat([one.features for one in parts]),
        torch.cat([one.dense for one in parts if one.dense is not None]),
        {"click": torch.cat([one.labels["click"] for one in parts])},
    )


@pytest.mark.parametrize("optimizer", (Adam(0.05), RowWiseAdaGrad(0.1, weight_decay=0.1)), ids=lambda one: one.kind)
@pytest.mark.parametrize("accumulate", (1, 2))
def test_the_runtime_equals_a_user_training_loop(optimizer, accumulate):
    micro = masked_batches(6, accumulate)
    batches = [together(micro[at : at + accumulate]) for at in range(0, len(micro), accumulate)]
    plain, driven = Model(optimizer), Model(optimizer)
    for batch in batches:
        plain.loss(plain(batch), batch).backward()
    job = build(driven, plan_for(driven, batches[0]), accumulate=accumulate)
    for _ in job.run(micro):
        pass
    assert driven.sparse.steps == plain.sparse.steps == {"t": 6, "u": 3}
    for table in ("t", "u"):
        torch.testing.assert_close(
            driven.sparse.weight(table), plain.sparse.weight(table), rtol=0, atol=1e-12, msg=table
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


def test_an_update_looks_at_each_table_a_few_times(monkeypatch):
    """Not at all tables for each table: with 100 tables that took longer than the update itself."""
    names = [f"t{at}" for at in range(50)]
    bags = EmbeddingBags([Table(name, ROWS, DIM) for name in names], [Feature(name, name) for name in names], SGD(0.1))
    asked: list[str] = []
    holder = EmbeddingBags.holder
    monkeypatch.setattr(EmbeddingBags, "holder", lambda self, name: asked.append(name) or holder(self, name))
    vectors = bags(ids(0, names))
    vectors.pooled_BD.sum().backward()
    assert bags.steps["t0"] == 1 and len(asked) <= 8 * len(names)
