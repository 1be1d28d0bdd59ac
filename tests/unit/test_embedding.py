"""EmbeddingBags in a user training loop compared with torch's embedding_bag and optimizers, and its errors."""

import pytest
import torch
from clicks import FEATURES, batch, ids, tables
from torch import nn

from shardwright.comm.mesh import Mesh
from shardwright.errors import UserError
from shardwright.jagged import Jagged, select
from shardwright.layers.embedding import EmbeddingBags
from shardwright.spec.optimizer import LAMB, SGD, AdaGrad, Adam, RowWiseAdaGrad
from shardwright.spec.workload import Feature, Table

OPTIMIZERS = (SGD(lr=0.1, momentum=0.9), AdaGrad(lr=0.1), RowWiseAdaGrad(lr=0.1), Adam(lr=0.1), LAMB(lr=0.1))


class TorchTables(nn.Module):
    """The same tables in torch: one parameter per table, shared by its features."""

    def __init__(self, bags: EmbeddingBags) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {table.name: nn.Parameter(bags.weight(table.name).detach().clone()) for table in bags.tables}
        )

    def forward(self, jagged: Jagged) -> torch.Tensor:
        pooled = []
        for feature in FEATURES:
            part = select(jagged, [feature.name])
            starts = nn.functional.pad(part.lengths[0].cumsum(0), (1, 0))[:-1]
            weight = self.weights[feature.table]
            pooled.append(nn.functional.embedding_bag(part.values, weight, starts, mode=feature.pooling))
        return torch.cat(pooled, dim=1)


@pytest.mark.parametrize(
    "optimizer, make_torch_optimizer",
    [
        (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (AdaGrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ],
    ids=["sgd", "adagrad"],
)
def test_twenty_steps_equal_torch(optimizer, make_torch_optimizer):
    bags = EmbeddingBags(tables(dtype="float64"), FEATURES, optimizer)
    twin = TorchTables(bags)
    torch_optimizer = make_torch_optimizer(twin.parameters())
    for step in range(20):
        jagged = ids(seed=step)
        target = torch.randn(16, 24, dtype=torch.float64)
        pooled, expected = bags(jagged).pooled_BD, twin(jagged)
        torch.testing.assert_close(pooled, expected, rtol=0, atol=1e-10)
        torch_optimizer.zero_grad()
        ((expected - target) ** 2).sum().backward()
        torch_optimizer.step()
        ((pooled - target) ** 2).sum().backward()
    for table in bags.tables:
        torch.testing.assert_close(bags.weight(table.name).data, twin.weights[table.name].data, rtol=0, atol=1e-10)
        assert bags.weight(table.name).grad is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
def test_backward_and_explicit_update_agree_bit_for_bit(optimizer):
    torch.manual_seed(1)
    loop = EmbeddingBags(tables(), FEATURES, optimizer)
    runtime = EmbeddingBags(tables(), FEATURES, optimizer)
    for step in range(5):
        jagged, target = ids(seed=step, weighted=True), torch.randn(16, 24)
        (loop(jagged).pooled_BD * target).sum().backward()
        lookup_input = runtime.read(jagged)
        with torch.no_grad():
            vectors = runtime.lookup(lookup_input)
        vectors.pooled_BD.requires_grad_()
        (vectors.pooled_BD * target).sum().backward()
        runtime.update(lookup_input, vectors.gradients())
    for table in loop.tables:
        assert torch.equal(loop.weight(table.name), runtime.weight(table.name))
        for name, state in loop.state(table.name).items():
            assert torch.equal(state, runtime.state(table.name)[name])


def test_unpooled_features_give_one_row_per_id_and_train():
    bags = EmbeddingBags([Table("t", 9, 4)], [Feature("a", "t", "none"), Feature("b", "t")], SGD(lr=1.0))
    before = bags.weight("t").detach().clone()
    jagged = Jagged(("a", "b"), torch.tensor([3, 3, 5, 5]), torch.tensor([[1, 2], [0, 1]]))
    vectors = bags(jagged)
    assert torch.equal(vectors["a"], before[[3, 3, 5]]) and vectors["b"].shape == (2, 4)
    (vectors["a"].sum() + vectors["b"].sum()).backward()
    change = before - bags.weight("t").detach()
    assert torch.equal(change.round(decimals=4)[[3, 5, 0]], torch.tensor([2.0, 2.0, 0.0])[:, None].expand(3, 4))


@pytest.mark.parametrize("optimizer", [None, SGD(lr=0.0)], ids=["ordinary", "fused"])
def test_id_weights_receive_gradients(optimizer):
    bags = EmbeddingBags(tables(dtype="float64"), FEATURES, optimizer)
    jagged = ids(weighted=True)
    weights = jagged.weights.double().requires_grad_()

    def run(weights):
        return bags(Jagged(jagged.features, jagged.values, jagged.lengths, weights)).pooled_BD

    if optimizer is None:
        assert torch.autograd.gradcheck(run, (weights,))
        return
    target = torch.randn(16, 24, dtype=torch.float64)
    trainable = EmbeddingBags(tables(dtype="float64"), FEATURES)
    trainable.load_state_dict(bags.state_dict())
    expected = trainable(Jagged(jagged.features, jagged.values, jagged.lengths, weights)).pooled_BD
    (expected * target).sum().backward()
    expected_grad, weights.grad = weights.grad, None
    (run(weights) * target).sum().backward()
    torch.testing.assert_close(weights.grad, expected_grad, rtol=0, atol=1e-12)


def test_without_an_optimizer_tables_are_ordinary_parameters():
    bags = EmbeddingBags(tables(dtype="float64"), FEATURES)
    twin, target = TorchTables(bags), torch.randn(16, 24, dtype=torch.float64)
    for module in (bags, twin):
        pooled = module(ids())
        ((pooled.pooled_BD if module is bags else pooled) * target).sum().backward()
    for table in bags.tables:
        torch.testing.assert_close(bags.weight(table.name).grad, twin.weights[table.name].grad, rtol=0, atol=1e-12)


def test_frozen_tables_do_not_change():
    bags = EmbeddingBags(tables(), FEATURES, SGD(lr=0.1))
    before = {table.name: bags.weight(table.name).detach().clone() for table in bags.tables}
    bags.weight("site").requires_grad_(False)
    bags(ids()).pooled_BD.sum().backward()
    assert torch.equal(bags.weight("site"), before["site"])
    assert not torch.equal(bags.weight("item"), before["item"])
    bags.requires_grad_(False)
    assert not bags.trained and not bags(ids()).pooled_BD.requires_grad


def test_optimizer_state_round_trip_and_refusal_of_other_states():
    bags, other = (EmbeddingBags(tables(), FEATURES, Adam(lr=0.1)) for _ in range(2))
    other.load_state_dict(bags.state_dict())
    for step in range(3):
        bags(ids(seed=step)).pooled_BD.sum().backward()
    other.load_state_dict(bags.state_dict())
    other.load_optimizer_state(bags.optimizer_state())
    for each in (bags, other):
        each(ids(seed=9)).pooled_BD.sum().backward()
    assert torch.equal(bags.weight("item"), other.weight("item"))
    state = bags.optimizer_state()
    for bad_state, message in (
        ({name: value for name, value in state.items() if name != "site.mean"}, '"site.mean" is missing'),
        (state | {"gone.sum": torch.zeros(1)}, '"gone.sum" is not of these tables'),
        (state | {"site.mean": state["site.mean"].double()}, '"site.mean" is float64'),
        (state | {"site.mean": torch.zeros(2)}, r'"site.mean" is float32 \(2,\); wanted float32 \(40, 8\)'),
    ):
        with pytest.raises(UserError, match=message):
            other.load_optimizer_state(bad_state)


@pytest.mark.parametrize("cast", ["double", "half", "bfloat16"])
def test_casting_tables_is_refused(cast):
    bags = getattr(EmbeddingBags(tables(), FEATURES, AdaGrad(lr=0.1)), cast)()
    with pytest.raises(UserError, match='table "site" was declared float32 and is now'):
        bags(ids())


def test_initial_weights_depend_only_on_seed_and_table_name():
    torch.manual_seed(7)
    both_tables = EmbeddingBags([Table("a", 9, 4), Table("b", 9, 4)], [Feature("x", "a"), Feature("y", "b")])
    torch.manual_seed(7)
    torch.rand(3)
    one_table = EmbeddingBags([Table("b", 9, 4)], [Feature("y", "b")])
    assert torch.equal(both_tables.weight("b"), one_table.weight("b"))
    assert not torch.equal(both_tables.weight("a"), both_tables.weight("b"))


def test_an_empty_batch_trains():
    bags = EmbeddingBags(tables(), FEATURES, Adam(lr=0.1))
    before = bags.weight("site").detach().clone()
    empty = Jagged(("site", "seen", "shown"), torch.empty(0, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64))
    bags(empty).pooled_BD.sum().backward()
    assert torch.equal(bags.weight("site"), before)


def test_two_tables_read_the_same_ids():
    """As wide-and-deep models do: one weight and one vector per id."""
    features = [Feature("site", "site"), Feature("site_wide", "wide", ids="site")]
    bags = EmbeddingBags([Table("site", 40, 8), Table("wide", 40, 1)], features, SGD(lr=0.5))
    jagged = select(ids(), ("site",))
    vectors = bags(jagged)
    single = EmbeddingBags([Table("wide", 40, 1)], [Feature("site", "wide")])
    single.weight("wide").data.copy_(bags.weight("wide"))
    assert torch.equal(vectors["site_wide"], single(jagged)["site"]) and vectors["site"].shape == (16, 8)
    before = bags.weight("wide").detach().clone()
    vectors["site_wide"].sum().backward()
    counts = torch.bincount(jagged.values, minlength=40)[:, None]
    torch.testing.assert_close(bags.weight("wide"), before - 0.5 * counts)


def test_two_lookups_in_one_backward_are_refused():
    bags = EmbeddingBags(tables(), FEATURES, SGD(lr=0.1))
    loss = bags(ids(seed=1)).pooled_BD.sum() + bags(ids(seed=2)).pooled_BD.sum()
    with pytest.raises(UserError, match="gradients are of old weights: look up all features in one call"):
        loss.backward()
    loss = bags(ids()).pooled_BD.square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UserError, match="run one backward per lookup"):
        loss.backward()


def test_the_weighted_setting_requires_ignores_or_allows_id_weights():
    unweighted, weighted = ids(), ids(weighted=True)
    free, strict, ignored = (EmbeddingBags(tables(), FEATURES, weighted=w) for w in (None, True, False))
    for bags in (strict, ignored):
        bags.load_state_dict(free.state_dict())
    assert torch.equal(strict(weighted).pooled_BD, free(weighted).pooled_BD)
    assert torch.equal(ignored(weighted).pooled_BD, free(unweighted).pooled_BD)
    with pytest.raises(UserError, match="pool by id weights and the batch has none"):
        strict(unweighted)


def test_ids_that_do_not_fit_their_lengths_are_refused():
    bags = EmbeddingBags(tables(), FEATURES)
    with pytest.raises(UserError, match="lengths add up to 3, but there are 2 ids"):
        bags(Jagged(("site", "seen", "shown"), torch.tensor([1, 2]), torch.ones(3, 1, dtype=torch.int64)))


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "2"}])
def test_training_separate_tables_in_several_processes_is_refused(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="2 processes would each train separate tables"):
        EmbeddingBags(tables(), FEATURES, SGD(lr=0.1))(ids())
    EmbeddingBags(tables(), FEATURES)(ids())
    with pytest.raises(UserError, match="2 processes were started"):
        Mesh()


@pytest.mark.parametrize("bad_id, feature, table, rows", [(40, "site", "site", 40), (-1, "site", "site", 40)])
def test_an_id_out_of_range_is_refused_with_table_feature_and_rows(bad_id, feature, table, rows):
    bags = EmbeddingBags(tables(), FEATURES)
    jagged = Jagged(("site", "seen", "shown"), torch.tensor([bad_id]), torch.tensor([[1], [0], [0]]))
    with pytest.raises(UserError) as error:
        bags(jagged)
    for part in (f'table "{table}"', f'feature "{feature}"', f"id {bad_id}", f"{rows} rows"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "tables_, features, message",
    [
        ([Table("a", 1, 1), Table("a", 1, 1)], [Feature("x", "a")], 'table "a" appears 2 times'),
        ([Table("a", 1, 1)], [Feature("x", "a"), Feature("x", "a")], 'feature "x" appears 2 times'),
        ([Table("site", 1, 1)], [Feature("x", "sites")], 'unknown table "sites"; did you mean "site"'),
        ([Table("a", 1, 1), Table("b", 1, 1)], [Feature("x", "a")], 'table "b" is read by no feature'),
        ([Table("a.b", 1, 1)], [Feature("x", "a.b")], "a dot in a name"),
        ([Table("a", 0, 1)], [Feature("x", "a")], 'table "a": rows is 0; wanted more than 0'),
        ([Table("a", 1, 1, init=-1.0)], [Feature("x", "a")], 'table "a": init is -1.0; wanted 0 or more'),
        ([Table("a", 1, 1, dtype="int8")], [Feature("x", "a")], 'table "a" has dtype "int8"; allowed: float64'),
        ([Table("a", 1, 1)], [Feature("x", "a", "max")], 'feature "x" has pooling "max"; allowed'),
        ([], [], "without a table"),
        ([Table("train", 1, 1)], [Feature("x", "train")], "torch modules reserve this name"),
    ],
)
def test_wrong_tables_and_features_are_named(tables_, features, message):
    with pytest.raises(UserError, match=message):
        EmbeddingBags(tables_, features)


def test_an_unknown_feature_of_vectors_gets_a_suggestion():
    with pytest.raises(UserError, match='"sit"; did you mean "site"'):
        EmbeddingBags(tables(), FEATURES)(batch())["sit"]


@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile itself
def test_compiled_models_have_the_same_losses():
    """torch.compile of a dense model around tables with a fused update."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse = EmbeddingBags(tables(), FEATURES, RowWiseAdaGrad(lr=0.1))
            self.dense = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, jagged: Jagged) -> torch.Tensor:
            return self.dense(self.sparse(jagged).pooled_BD)

    losses = []
    for compiled in (False, True):
        torch.manual_seed(2)
        model = Model()
        step = torch.compile(model, backend="aot_eager") if compiled else model
        losses.append([])
        for seed in range(3):
            loss = step(ids(seed=seed)).square().mean()
            loss.backward()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][0] != losses[0][-1]


def test_a_row_that_is_not_finite_is_reported():
    bags = EmbeddingBags([Table("a", 9, 4), Table("b", 70_000, 2)], [Feature("x", "a"), Feature("y", "b")])
    bags.check_finite()
    bags.weight("b").data[69_999, 1] = float("nan")
    with pytest.raises(UserError, match='table "b": row 69999 is not finite'):
        bags.check_finite()
