"""Two towers and their in-batch softmax, compared with plain PyTorch."""

import numpy as np
import pytest
import torch
from rated_items import ITEMS, RatedItems, make_model
from torch import nn
from torch.nn import functional

from shardwright.data.loading.loader import Loader, to_batch
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.in_batch_softmax import InBatchSoftmax, SoftmaxSpec
from shardwright.layers.mlp import MLPForm
from shardwright.measure.describe import describe
from shardwright.models.click_inputs import ClickInputs
from shardwright.models.ctr import two_tower
from shardwright.models.two_tower import make_two_tower
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.spec.optimizer import AdaGrad
from shardwright.spec.workload import Feature, Table


def make_batch(size: int, *, weighted: bool = False, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    items = torch.randint(0, 5, (size,), generator=draw)
    weights = torch.rand(size, generator=draw, dtype=torch.float64) if weighted else None
    labels = torch.randint(0, 2, (size,), generator=draw).double()
    return Batch(Jagged(("item",), items, torch.ones(1, size, dtype=torch.int64)), None, {"click": labels}, weights)


def plain_loss(vectors: torch.Tensor, batch: Batch, groups: int, log_shares: torch.Tensor | None) -> torch.Tensor:
    """The loss, sample by sample: torch's cross entropy over the positive's item and its negatives."""
    size, items, labels = batch.batch_size, batch.features.values.tolist(), batch.labels["click"].tolist()
    weights = [1.0] * size if batch.weights is None else batch.weights.tolist()
    total, sum_of_weights = torch.zeros((), dtype=torch.float64), 0.0
    for sample in (sample for sample in range(size) if labels[sample]):
        group = next(g for g in range(groups) if size * g // groups <= sample < size * (g + 1) // groups)
        others = [
            other
            for other in range(size * group // groups, size * (group + 1) // groups)
            if labels[other] and weights[other] and items[other] != items[sample]
        ]
        candidates = [sample, *others]
        logits = torch.stack([vectors[sample, 0].dot(vectors[other, 1]) for other in candidates]) / 0.5
        if log_shares is not None:
            logits = logits - log_shares[[items[other] for other in candidates]]
        total = total + weights[sample] * functional.cross_entropy(logits, torch.tensor(0))
        sum_of_weights += weights[sample]
    return total / sum_of_weights


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 4])
def test_the_loss_equals_a_plain_one(groups, weighted, corrected):
    """22 samples are no multiple of 3 or 4 groups."""
    batch = make_batch(22, weighted=weighted)
    if batch.weights is not None:
        batch.weights[:3] = 0.0
    log_shares = torch.tensor([0.3, 0.1, 0.2, 0.15, 0.25], dtype=torch.float64).log() if corrected else None
    loss = InBatchSoftmax("item", temperature=0.5, groups=groups, correction=corrected, log_shares=log_shares)
    vectors, plain = (
        torch.randn(22, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    value, expected = (
        loss(vectors.requires_grad_(), batch),
        plain_loss(plain.requires_grad_(), batch, groups, log_shares),
    )
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
    value.backward()
    expected.backward()
    torch.testing.assert_close(vectors.grad, plain.grad, rtol=0, atol=1e-10)
    weights = torch.ones(22, dtype=torch.float64) if batch.weights is None else batch.weights
    assert float(loss.weight(batch)) == pytest.approx(float((weights * batch.labels["click"]).sum()))


def test_groups_of_one_process_equal_its_parts():
    batch, vectors = make_batch(24), torch.randn(24, 2, 6, dtype=torch.float64)
    grouped, alone = InBatchSoftmax("item", groups=4), InBatchSoftmax("item")
    parts = [(batch.narrow(start, start + 6), vectors[start : start + 6]) for start in range(0, 24, 6)]
    weights = torch.stack([alone.weight(part) for part, _ in parts])
    expected = torch.dot(torch.stack([alone(x, part) for part, x in parts]), weights) / weights.sum()
    torch.testing.assert_close(grouped(vectors, batch), expected, rtol=0, atol=1e-10)
    assert not torch.allclose(alone(vectors, batch), expected, atol=1e-3)


@pytest.mark.parametrize("size", [0, 2, 6])
def test_a_batch_without_a_positive_has_loss_0_and_no_gradient(size):
    batch, vectors = make_batch(size), torch.randn(size, 2, 3, dtype=torch.float64, requires_grad=True)
    batch.labels["click"].zero_()
    loss = InBatchSoftmax("item", groups=4)
    value = loss(vectors, batch)
    value.backward()
    assert float(value.detach()) == 0 == float(loss.weight(batch)) and not vectors.grad.any()


def test_bad_inputs_of_the_loss_are_errors():
    batch, vectors = make_batch(4), torch.randn(4, 2, 3, dtype=torch.float64)
    loss = InBatchSoftmax("item")
    with pytest.raises(UserError, match=r"the model returned \(4, 3\); wanted .* \(4, 2, columns\)"):
        loss(vectors[:, 0], batch)
    with pytest.raises(UserError, match='no label "liked"; it has'):
        InBatchSoftmax("item", label="liked")(vectors, batch)
    with pytest.raises(UserError, match='"click" has values other than 0 and 1'):
        loss(vectors, Batch(batch.features, None, {"click": torch.full((4,), 0.5)}))
    several = Jagged(("item",), torch.zeros(8, dtype=torch.int64), torch.full((1, 4), 2))
    with pytest.raises(UserError, match='"item" has samples with none or several ids'):
        loss(vectors, Batch(several, None, batch.labels))
    with pytest.raises(UserError, match="set correction=false"):
        InBatchSoftmax("item", correction=True)(vectors, batch)
    for arguments in ({"temperature": 0.0}, {"temperature": float("nan")}, {"groups": 0}):
        with pytest.raises(UserError, match="wanted"):
            InBatchSoftmax("item", **arguments)


class PlainTowers(nn.Module):
    """The same model in plain PyTorch, with a dense gradient of every table."""

    def __init__(self, model) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                name: nn.EmbeddingBag.from_pretrained(
                    model.sparse.weight(name).detach().clone(), freeze=False, mode="mean"
                )
                for name in ("user", "item", "kinds")
            }
        )
        self.user, self.item = (
            nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 4)).double() for width in (5, 9)
        )
        for side in ("user", "item"):
            getattr(self, side).load_state_dict(getattr(model.dense, side).steps.state_dict())

    def forward(self, batch: Batch) -> torch.Tensor:
        size = batch.batch_size
        users, items, kinds = batch.features.values.split([size, size, 2 * size])
        user, item = self.tables["user"](users.view(-1, 1)), self.tables["item"](items.view(-1, 1))
        kind = self.tables["kinds"](kinds.view(-1, 2))
        vectors = [
            self.user(torch.cat([user, batch.dense[:, 1:]], 1)),
            self.item(torch.cat([item, kind, batch.dense[:, :1]], 1)),
        ]
        return functional.normalize(torch.stack(vectors, 1), dim=2)


def test_training_equals_plain_pytorch():
    model = make_model(AdaGrad(0.1), temperature=0.5)
    twin = PlainTowers(model)
    with Loader(RatedItems(), batch_size=64) as loader:
        batches = [batch for batch, _ in zip(loader, range(6), strict=False)]
    batches = [Batch(b.features, b.dense.double(), {"click": b.labels["click"].double()}) for b in batches]
    job = build(model, plan_for(model, batches[0]), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    dense = torch.optim.Adam([*twin.user.parameters(), *twin.item.parameters()], 0.01)
    tables = torch.optim.Adagrad(twin.tables.parameters(), 0.1)
    for output, batch in zip(job.run(batches), batches, strict=True):
        for optimizer in (dense, tables):
            optimizer.zero_grad()
        items = Batch(
            Jagged(("item",), batch.features.values[64:128], torch.ones(1, 64, dtype=torch.int64)), None, batch.labels
        )
        loss = plain_loss(twin(batch), items, 1, None)
        torch.testing.assert_close(output.loss, loss, rtol=0, atol=1e-10)
        loss.backward()
        for optimizer in (dense, tables):
            optimizer.step()
    for name, table in twin.tables.items():
        torch.testing.assert_close(model.sparse.weight(name), table.weight, rtol=0, atol=1e-9)


def test_a_vector_depends_on_its_own_tower_only():
    model = make_model(dtype="float32")
    first, second = to_batch(RatedItems().take(np.array([3]))), to_batch(RatedItems().take(np.array([8])))
    users, items, kinds = (
        torch.cat([parts[i] for parts in (x.features.values.split([1, 1, 2]) for x in (first, second))])
        for i in range(3)
    )
    mixed = Jagged(first.features.features, torch.cat([users[:1], items[1:], kinds[2:]]), first.features.lengths)
    numbers = torch.stack([second.dense[:, 0], first.dense[:, 1]], 1)
    both = model(Batch(mixed, numbers, {}))
    assert torch.equal(both[:, 0], model(first)[:, 0]) and torch.equal(both[:, 1], model(second)[:, 1])
    torch.testing.assert_close(both.norm(dim=2), torch.ones(1, 2))
    assert not torch.allclose(make_model(dtype="float32", normalize=False)(first).norm(dim=2), torch.ones(1, 2))


def test_batch_norms_see_only_the_positives():
    """Samples without a loss change neither the steps of the others nor the running statistics."""
    jobs, batch = [], to_batch(RatedItems(size=64).take(np.arange(64)))
    positives = batch.labels["click"].nonzero().squeeze(1)
    assert 0 < len(positives) < 64
    for rows in (np.arange(64), positives.numpy()):
        part = to_batch(RatedItems(size=64).take(rows))
        part = Batch(part.features, part.dense.double(), {"click": part.labels["click"].double()})
        model = make_model(AdaGrad(0.1), form=MLPForm("silu", "batch"))
        job = build(model, plan_for(model, part), optimizer=lambda p: torch.optim.SGD(p, 0.1))
        jobs.append((job, [float(output.loss) for output in job.run([part] * 3)]))
    assert jobs[0][1] == pytest.approx(jobs[1][1], abs=1e-10)
    states = [job.state().tensors for job, _ in jobs]
    assert any(name.endswith("running_var") for name in states[0])
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_the_planner_describes_it():
    batch = to_batch(RatedItems().take(np.arange(16)))
    blocks = describe(make_model(dtype="float32", form=MLPForm(norm="batch")), batch).blocks
    assert {"dense.user", "dense.item"} <= {block.name for block in blocks}


@pytest.mark.parametrize(
    ("user", "item", "message"),
    [
        (["user"], ["item", "kinds", "number_0"], 'feature "number_1" is neither in model.user nor in model.item'),
        (["user", "number_1", "number_0"], ["item"], 'feature "kinds" is neither'),
        (["usr"], ["item"], 'model.user: the data have no feature "usr"; did you mean "user"'),
        (["user", "item"], ["item", "kinds"], 'feature "item" is 2 times'),
        ([], ["item"], "model.user is empty"),
        (["user", "number_0", "number_1"], ["kinds", "item"], 'model.item begins with "kinds"'),
        (["number_0", "user", "number_1"], ["item", "kinds"], 'model.user begins with "number_0"'),
    ],
)
def test_bad_assignments_of_features_are_errors(user, item, message):
    with pytest.raises(UserError, match=message):
        two_tower(ClickInputs(RatedItems(), AdaGrad(0.1)), dim=4, user=user, item=item, hidden=[4])


def test_other_bad_arguments_are_errors():
    sides = {"user": ["user", "number_0", "number_1"], "item": ["item", "kinds"]}
    with pytest.raises(UserError, match=r"hidden=\[\]"):
        two_tower(ClickInputs(RatedItems(), AdaGrad(0.1)), dim=4, hidden=[], **sides)
    with pytest.raises(UserError, match=r"output_bias=0\.5: two towers return vectors and have no such bias; drop it"):
        two_tower(ClickInputs(RatedItems(), AdaGrad(0.1)), dim=4, hidden=[4], mlp={"output_bias": 0.5}, **sides)
    with pytest.raises(UserError, match='model.softmax.temprature is unknown; did you mean "temperature"'):
        two_tower(ClickInputs(RatedItems(), AdaGrad(0.1)), dim=4, hidden=[4], softmax={"temprature": 1.0}, **sides)


def test_the_correction_takes_the_shares_of_the_source():
    class Shares(RatedItems):
        def id_shares(self, feature: str) -> np.ndarray:
            assert feature == "item"
            return np.full(ITEMS + 2, 0.25)

    tables = [Table(name, rows, 4) for name, rows, _ in RatedItems.features]
    sparse = EmbeddingBags(tables, [Feature(table.name, table.name) for table in tables], AdaGrad(0.1))
    sides = ["user", "number_0", "number_1"], ["item", "kinds"]
    model = make_two_tower(Shares(), sparse, *sides, [4], SoftmaxSpec(correction=True))
    torch.testing.assert_close(model.loss.log_shares, torch.full((ITEMS + 2,), 0.25).log())
    assert not any("log_shares" in name for name in model.state_dict())
