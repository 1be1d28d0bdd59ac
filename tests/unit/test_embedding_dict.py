"""EmbeddingBagsDict in one process: equal to plain torch, and to a separate EmbeddingBags for each member."""

import copy
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from towers import ROWS, Towers, batch, make_item, make_towers, make_user

import shardwright as sw
from shardwright.checkpoint import step_directories
from shardwright.config import parse_planning
from shardwright.config.overrides import apply_overrides
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors
from shardwright.layers.embedding_dict import EmbeddingBagsDict
from shardwright.runtime.job import Job
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.saving import Saver
from shardwright.spec.optimizer import SGD, AdaGrad, Adam, RowWiseAdaGrad, SparseOptimizer
from shardwright.spec.workload import Feature, Table

STEPS = 6
KEYS = (
    "sparse.user.embedding_bags.site.weight",
    "sparse.user.embedding_bags.tag.weight",
    "sparse.user.embedding_bags.past.weight",
    "sparse.item.embedding_bags.small.weight",
    "sparse.item.embedding_bags.site.weight",
)


class PlainTowers(nn.Module):
    """The same vectors from torch's own modules."""

    def __init__(self, like: Towers) -> None:
        super().__init__()
        self.tables = nn.ModuleDict()
        for member, bags in like.sparse.members.items():
            for table in bags.tables:
                weight = bags.weight(table.name).detach().clone()
                self.tables[f"{member}_{table.name}"] = nn.Embedding.from_pretrained(weight, freeze=False)
        self.members = {member: (bags.features, bags.weighted) for member, bags in like.sparse.members.items()}

    def forward(self, features: Jagged) -> dict[str, Vectors]:
        starts = [0, *features.lengths.sum(1).cumsum(0).tolist()]
        vectors = {}
        for member, (own, weighted) in self.members.items():
            pooled, sequences = {}, {}
            for feature in own:
                index = features.features.index(feature.ids or feature.name)
                ids = features.values[starts[index] : starts[index + 1]]
                rows = self.tables[f"{member}_{feature.table}"](ids)
                if feature.pooling == "none":
                    sequences[feature.name] = rows
                    continue
                if weighted:
                    rows = rows * features.weights[starts[index] : starts[index + 1]].unsqueeze(1)
                lengths = features.lengths[index]
                bag = torch.arange(len(lengths)).repeat_interleave(lengths)
                sums = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, bag, rows)
                pooled[feature.name] = sums / lengths.clamp(min=1).unsqueeze(1) if feature.pooling == "mean" else sums
            dims = tuple(part.shape[1] for part in pooled.values())
            vectors[member] = Vectors(tuple(pooled), dims, torch.cat([*pooled.values()], 1), sequences)
        return vectors


def train(model: nn.Module, dense: nn.Module, sparse, optimizers, steps: int = STEPS) -> list[torch.Tensor]:
    logits_of_steps = []
    for step in range(steps):
        samples = batch(step)
        logits = dense(samples, sparse(samples.features))
        for optimizer in optimizers:
            optimizer.zero_grad()
        model.loss(logits, samples).backward()
        for optimizer in optimizers:
            optimizer.step()
        logits_of_steps.append(logits.detach())
    return logits_of_steps


@pytest.mark.parametrize(
    "optimizer, torch_optimizer",
    ((SGD(0.5), partial(torch.optim.SGD, lr=0.5)), (AdaGrad(0.1), partial(torch.optim.Adagrad, lr=0.1))),
    ids=("sgd", "adagrad"),
)
def test_it_trains_as_plain_torch_does(optimizer, torch_optimizer):
    model = make_towers(optimizer)
    plain, plain_dense = PlainTowers(model), copy.deepcopy(model.dense)
    expected = train(
        model, plain_dense, plain, [torch_optimizer(plain.parameters()), torch.optim.SGD(plain_dense.parameters(), 0.1)]
    )
    logits = train(model, model.dense, model.sparse, [torch.optim.SGD(model.dense.parameters(), 0.1)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    for member, bags in model.sparse.members.items():
        for table in bags.tables:
            plain_weight = plain.tables[f"{member}_{table.name}"].weight
            torch.testing.assert_close(bags.weight(table.name), plain_weight, rtol=0, atol=1e-12)
    assert set(model.sparse.steps.values()) == {STEPS} and model.sparse.steps["user.site"] == STEPS


def separate_members(sparse: EmbeddingBagsDict, optimizer: SparseOptimizer) -> dict[str, sw.EmbeddingBags]:
    """EmbeddingBags with the weights of each member."""
    separate = {"user": make_user(optimizer, "float64"), "item": make_item(optimizer, "float64")}
    for name, bags in separate.items():
        bags.load_state_dict(sparse[name].state_dict())
    return separate


@pytest.mark.parametrize("optimizer", (RowWiseAdaGrad(0.1), Adam(0.05)), ids=lambda opt: opt.kind)
def test_it_equals_separate_embedding_bags_to_the_bit(optimizer):
    model = make_towers(optimizer)
    dense, separate = copy.deepcopy(model.dense), separate_members(model.sparse, optimizer)
    runs = [
        train(model, own_dense, sparse, [torch.optim.SGD(own_dense.parameters(), 0.1)])
        for own_dense, sparse in (
            (model.dense, model.sparse),
            (dense, lambda ids: {name: bags(ids) for name, bags in separate.items()}),
        )
    ]
    assert all(map(torch.equal, *runs))
    for name, bags in separate.items():
        states = model.sparse[name].optimizer_state(), bags.optimizer_state()
        assert states[0].keys() == states[1].keys()
        for key, value in states[1].items():
            assert key.endswith("rounding_key") or torch.equal(states[0][key], value)
        assert all(map(torch.equal, model.sparse[name].parameters(), bags.parameters()))


def test_a_member_that_the_loss_does_not_use_is_not_updated():
    model = make_towers(Adam(0.1))
    model.sparse(batch(0))["user"].pooled_BD.sum().backward()
    assert model.sparse["item"].steps == {"small": 0, "site": 0} and model.sparse.steps["user.past"] == 0
    assert model.sparse["user"].steps["site"] == 1


def test_gradients_reach_the_id_weights_of_weighted_members_only():
    model, samples = make_towers(SGD(0.1)), batch(0)
    weights = samples.features.weights.requires_grad_()
    vectors = model.sparse(samples)
    (vectors["user"].pooled_BD.sum() + vectors["item"].pooled_BD.square().sum()).backward()
    names = samples.features.features
    by_feature = dict(zip(names, weights.grad.split(samples.features.lengths.sum(1).tolist()), strict=True))
    assert by_feature["small"].any() and by_feature["site"].any()
    assert not by_feature["tag"].any() and not by_feature["past"].any()


def test_names_and_shapes():
    model = make_towers(SGD(0.1))
    assert [name for name in model.state_dict() if name.startswith("sparse")] == list(KEYS)
    assert [table.name for table in model.sparse.tables] == [
        "user.site",
        "user.tag",
        "user.past",
        "item.small",
        "item.site",
    ]
    vectors = model.sparse(batch(0))
    assert vectors["user"].features == ("tag", "site", "again") and vectors["user"]["again"].shape == (24, 4)
    assert vectors["item"].features == ("site", "small") and list(vectors["user"].sequences) == ["past"]
    assert model.sparse.weight("item.site") is model.sparse["item"].weight("site")


def test_tables_of_one_name_start_with_different_values():
    sparse = make_towers(SGD(0.1)).sparse
    assert not torch.equal(sparse.weight("user.site"), sparse.weight("item.site"))
    torch.manual_seed(3)
    again = make_item(SGD(0.1), "float64")
    with torch.no_grad():
        again.weight("site")[3:5] = 7.0
    kept = again.weight("site").clone()
    sparse = EmbeddingBagsDict({"item": again})
    assert torch.equal(sparse.weight("item.site"), kept), "values that were set stay"
    assert torch.equal(sparse.weight("item.small"), make_towers(SGD(0.1)).sparse.weight("item.small"))


def test_a_member_can_be_looked_up_but_not_trained_by_itself():
    model = make_towers(SGD(0.1))
    with torch.no_grad():
        assert torch.equal(model.sparse["item"](batch(0)).pooled_BD, model.sparse(batch(0))["item"].pooled_BD)
    with pytest.raises(UserError, match='"item" is a member of an EmbeddingBagsDict: to train, call'):
        model.sparse["item"](batch(0))


def test_optimizer_state_and_learning_rate_belong_to_all_members():
    model = make_towers(Adam(0.1))
    train(model, model.dense, model.sparse, [])
    saved = {name: value.clone() for name, value in model.sparse.optimizer_state().items()}
    assert saved["user.site.step"] == STEPS and saved["item.site.mean"].any()
    other = make_towers(Adam(0.1))
    other.load_state_dict(model.state_dict())
    other.sparse.load_optimizer_state(saved)
    for part in (model.sparse, other.sparse):
        part.optimizer = replace(part.optimizer, lr=0.01)
    assert other.sparse["item"].optimizer == Adam(0.01)
    logits = [train(part, part.dense, part.sparse, [], 2) for part in (model, other)]
    assert all(map(torch.equal, *logits))
    other.sparse["item"].optimizer = Adam(0.3)
    with pytest.raises(UserError, match='members "user" and "item" have different optimizers'):
        other.sparse(batch(0))


def member(name: str = "t", optimizer: SparseOptimizer | None = None, dtype: str = "float32") -> sw.EmbeddingBags:
    return sw.EmbeddingBags([Table(name, 4, 2, dtype)], [Feature("f", name)], optimizer)


def share_a_weight() -> dict[str, sw.EmbeddingBags]:
    first, second = member(optimizer=SGD(0.1)), member(optimizer=SGD(0.1))
    second.adopt("t", first.weight("t"))
    return {"a": first, "b": second}


def join_twice() -> dict[str, sw.EmbeddingBags]:
    bags = member()
    EmbeddingBagsDict({"a": bags})
    return {"b": bags}


@pytest.mark.parametrize(
    "make_members, expected",
    (
        (dict, "without a member"),
        (lambda: {"a": nn.EmbeddingBag(3, 2)}, 'member "a" is a EmbeddingBag; wanted EmbeddingBags'),
        (lambda: {"a": EmbeddingBagsDict({"b": member()})}, 'member "a" is a EmbeddingBagsDict; wanted EmbeddingBags'),
        (lambda: {"a.b": member()}, 'member "a.b": wanted a name without a dot'),
        (lambda: {"optimizer": member()}, 'member "optimizer": EmbeddingBagsDict reserves this name'),
        (lambda: {"dims": member()}, 'member "dims": EmbeddingBagsDict reserves this name'),
        (lambda: dict.fromkeys("ab", member()), 'members "a" and "b" are the same EmbeddingBags'),
        (join_twice, 'member "b" is already in an EmbeddingBagsDict'),
        (share_a_weight, 'tables "a.t" and "b.t" share one weight'),
        (lambda: {"a": member(), "b": member(dtype="float64")}, 'member "b" has float64 tables, "a" others'),
        (
            lambda: {"a": member(optimizer=SGD(0.1)), "b": member()},
            'members "a" and "b" have different optimizers, SGD.* and None.*give all members the same',
        ),
    ),
)
def test_errors_name_the_member_and_the_remedy(make_members, expected):
    with pytest.raises(UserError, match=expected) as error:
        EmbeddingBagsDict(make_members())
    assert "\n" not in str(error.value)


def test_other_errors():
    model = make_towers(SGD(0.1))
    with pytest.raises(UserError, match='the tables of "item" pool by id weights and the batch has none'):
        model.sparse(batch(0, weighted=False))
    with pytest.raises(UserError, match='no member "users"; did you mean "user"'):
        model.sparse["users"]
    values = batch(0).features.values.clone()
    values[0] = 40
    ids = replace(batch(0).features, values=values)
    with pytest.raises(UserError, match=r'table "user.site", feature "user.site": id 40 is outside its 40 rows'):
        model.sparse(ids)
    pair = Towers(make_user(SGD(0.1), "float64"), torch.float64)
    pair.other = make_item(SGD(0.1), "float64")
    with pytest.raises(UserError, match=r'several EmbeddingBags \("sparse", "other"\).*EmbeddingBagsDict'):
        sw.build(pair, None)
    pair.sparse = nn.ModuleDict({"user": make_user(SGD(0.1), "float64")})
    with pytest.raises(
        UserError, match="sparse is a ModuleDict; wanted EmbeddingBags, or EmbeddingBagsDict of several"
    ):
        sw.describe(pair, batch(0))


def make_job(optimizer: SparseOptimizer, dtype: str = "float64", weighted: bool = True, **options) -> Job:
    model = make_towers(optimizer, dtype, weighted)
    plan = sw.plan_for(model, batch(0, dtype=getattr(torch, dtype), weighted=weighted))
    return sw.build(model, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1), **options)


def test_a_job_equals_a_user_loop():
    model = make_towers(AdaGrad(0.1))
    expected = train(model, model.dense, model.sparse, [torch.optim.SGD(model.dense.parameters(), 0.1)])
    job = make_job(AdaGrad(0.1))
    logits = [out.logits for out in job.run(batch(step) for step in range(STEPS))]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    evaluated = next(iter(job.evaluate([batch(50)]))).logits
    with torch.no_grad():
        torch.testing.assert_close(evaluated, model(batch(50)), rtol=0, atol=1e-12)
    names = job.state().tensors
    assert {f"model.{key}" for key in KEYS} <= set(names) and "tables.sparse.user.site.sum" in names


def test_tables_on_the_meta_device_start_as_others_do():
    with torch.device("meta"):
        sparse = make_towers(RowWiseAdaGrad(0.1)).sparse
    model = make_towers(RowWiseAdaGrad(0.1))
    expected = {name: value.clone() for name, value in model.sparse.state_dict().items()}
    model.sparse = sparse
    sw.build(model, sw.plan_for(model, batch(0)), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    for name, value in model.sparse.state_dict().items():
        assert torch.equal(value, expected[name])


def test_a_frozen_member_keeps_its_weights():
    model = make_towers(Adam(0.1))
    model.sparse["item"].requires_grad_(False)
    before = {name: value.clone() for name, value in model.sparse.state_dict().items()}
    job = sw.build(model, sw.plan_for(model, batch(0)), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    run(job, 0, 2)
    for name, value in model.sparse.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("item")
    assert {name for name, step in model.sparse.steps.items() if step == 0} == {"item.small", "item.site"}


def test_members_have_the_dtypes_of_the_plan():
    model = make_towers(RowWiseAdaGrad(0.1), "float32")
    plan = sw.plan_for(model, batch(0, dtype=torch.float32), allow=("tables.bf16",))
    placements = [replace(table.placement, weight_dtype="bfloat16") for table in plan.tables]
    tables = tuple(replace(t, placement=placement) for t, placement in zip(plan.tables, placements, strict=True))
    job = sw.build(model, replace(plan, tables=tables), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    assert {table.dtype for table in (*model.sparse.tables, *model.sparse["user"].tables)} == {"bfloat16"}
    next(iter(job.run([batch(0, dtype=torch.float32)])))
    assert model.sparse["user"].weight("site").dtype == torch.bfloat16 and model.sparse.steps["user.site"] == 1


def test_accumulated_micro_batches_equal_one_batch():
    def halves(samples: Batch) -> list[Batch]:
        return [samples.narrow(0, 9), samples.narrow(9, 24)]

    whole, parts = make_job(RowWiseAdaGrad(0.1)), make_job(RowWiseAdaGrad(0.1), accumulate=2)
    for job, batches in ((whole, [batch(1), batch(2)]), (parts, [*halves(batch(1)), *halves(batch(2))])):
        for _ in job.run(batches):
            pass
    expected = whole.state().tensors
    for name, value in parts.state().tensors.items():
        if not name.startswith("random"):
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def test_a_checkpoint_resumes_to_the_bit(tmp_path):
    job = make_job(Adam(0.05))
    run(job, 0, 3)
    path = job.save(tmp_path)
    run(job, 3, 6)
    resumed = make_job(Adam(0.05))
    resumed.load(path)
    run(resumed, 3, 6)
    expected = job.state().tensors
    assert all(torch.equal(value, expected[name]) for name, value in resumed.state().tensors.items())


def run(job: Job, first: int, end: int) -> None:
    for _ in job.run(batch(step) for step in range(first, end)):
        pass


@pytest.mark.parametrize(
    "stored, dtype, tolerance",
    (("", "float64", 1e-12), ("", "float32", 1e-6), ("float16", "float32", 1e-3), ("int8", "float32", 1e-2)),
)
def test_a_predictor_scores_and_follows(tmp_path, stored, dtype, tolerance):
    job = make_job(RowWiseAdaGrad(0.1), dtype, weighted=False)
    changes, root = job.changes, tmp_path / "published"
    root.mkdir()
    publisher = Saver(RankGroup(job.mesh), root, keep=9, increments=9, changes=changes, is_publication=True)
    samples = [batch(step, dtype=getattr(torch, dtype), weighted=False) for step in range(7)]
    for _ in job.run(samples[:3]):
        pass
    model = make_towers(RowWiseAdaGrad(0.1), dtype, weighted=False)
    sw.export(model, job.save(tmp_path / "saved"), tmp_path / "out", example=samples[0], stored=stored)
    for step in range(3, 6):
        next(iter(job.run(samples[step : step + 1])))
        job.publish_with(publisher, {})
    publisher.wait()
    assert len(step_directories.list_checkpoints(root)) == 3
    with closing(sw.Predictor(tmp_path / "out", follow=root)) as predictor:
        assert predictor.step == 6 and set(predictor.served.names) == {table.name for table in job.model.sparse.tables}
        assert predictor.served.names["item.site"] == f"model.{KEYS[-1]}"
        expected = next(iter(job.evaluate(samples[6:]))).logits.sigmoid()
        torch.testing.assert_close(predictor.scores(samples[6]), expected, rtol=0, atol=tolerance)


def test_an_export_without_weights_for_a_weighted_member_is_refused(tmp_path):
    job = make_job(SGD(0.1))
    with pytest.raises(UserError, match="pool by id weights, which requests cannot have"):
        sw.export(job.model, job.save(tmp_path), tmp_path / "out", example=batch(0))


def test_an_increment_has_the_changed_rows_of_the_right_table(tmp_path):
    job = make_job(SGD(0.1))
    saver = Saver(RankGroup(job.mesh), tmp_path, increments=3, changes=job.changes)
    for step in range(2):
        run(job, step, step + 1)
        job.save_with(saver, {})
    saver.wait()
    loaded = make_job(SGD(0.1))
    loaded.load(Path(step_directories.list_checkpoints(tmp_path)[-1]))
    expected = job.state().tensors
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state().tensors.items())


def test_describe():
    workload = sw.describe(make_towers(AdaGrad(0.1)), batch(0))
    workload.verify()
    assert [(table.name, table.rows, table.dim) for table in workload.tables][-1] == ("item.site", 40, 8)
    assert {feature.name: feature.ids for feature in workload.features}["user.again"] == "tag"
    statistics = {entry.feature: entry.ids_per_sample for entry in workload.statistics}
    assert statistics["user.site"] == statistics["item.site"] > 0
    assert {block.name for block in workload.blocks} >= {"dense.user", "dense.item"}


@pytest.mark.parametrize(
    "pins",
    (
        {"user": {"site": "row"}, "item.site": "table@0", "plain": "column:2"},
        {"user.site": "row", "item": {"site": "table@0"}, "plain": "column:2"},
    ),
)
def test_pins_name_tables_by_path_in_sections_or_as_quoted_keys(pins):
    _, planning, _ = parse_planning({"plan": {"pins": pins}}, "test")
    assert planning.pins == {"user.site": "row", "item.site": "table@0", "plain": "column:2"}


def test_pins_of_dotted_overrides():
    values = apply_overrides(
        {"plan": {"pins": {"user.site": "row"}}}, ["plan.pins.user.site=table", "plan.pins.tag=row"]
    )
    assert parse_planning(values, "test")[1].pins == {"user.site": "table", "tag": "row"}


def test_torch_modules_of_a_dict_are_those_of_its_members():
    model = make_towers(SGD(0.1), weighted=False)
    with pytest.raises(UserError, match='table "user.site" is of an EmbeddingBagsDict: convert each member'):
        sw.to_torchrec(model.sparse, None, None, str)
    assert sw.to_torch(model.sparse["item"])[0].weight is model.sparse.weight("item.site")
    assert len(ROWS) == 4
