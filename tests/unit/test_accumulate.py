"""Several batches as one step, in one process: against the batch that they are together."""

from dataclasses import replace

import pytest
import torch
from clicks import FEATURES, batch, dlrm, tables
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models import tokens

from shardwright.data.loading.loader import Loader
from shardwright.data.sources.synthetic import ClickStream
from shardwright.errors import UserError
from shardwright.jagged import Batch, Vectors, concat, narrow
from shardwright.kernels.arguments import Ids
from shardwright.kernels.dedup import concat_ids
from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.dlrm import DLRM
from shardwright.models.gpt import GPT
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_for
from shardwright.spec.optimizer import LAMB, SGD, AdaGrad, Adam, PartialRowWiseAdam, RowWiseAdaGrad
from shardwright.spec.workload import Feature, Table

OPTIMIZERS = (
    SGD(0.1, momentum=0.9),
    AdaGrad(0.1),
    RowWiseAdaGrad(0.1),
    Adam(0.01),
    PartialRowWiseAdam(0.01),
    LAMB(0.01),
)
SIZE = 12


def whole(seed: int, weights: torch.Tensor | None = None, *, weighted_ids: bool = False) -> Batch:
    found = replace(batch(SIZE, seed=seed, dtype=torch.float64), weights=weights)
    if not weighted_ids:
        return found
    weights = torch.rand(len(found.features.values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return replace(found, features=replace(found.features, weights=weights))


def cut(one: Batch, cuts) -> list[Batch]:
    ends = [0, *cuts, one.batch_size]
    return [
        Batch(
            narrow(one.features, start, stop),
            None if one.dense is None else one.dense[start:stop],
            {name: label[start:stop] for name, label in one.labels.items()},
            None if one.weights is None else one.weights[start:stop],
        )
        for start, stop in zip(ends, ends[1:], strict=False)
    ]


def job(optimizer=None, accumulate: int = 1, make=None) -> Job:
    torch.manual_seed(3)
    mine = dlrm(optimizer or RowWiseAdaGrad(0.1), "float64") if make is None else make()
    first = whole(0) if make is None else tokens()
    return build(mine, plan_for(mine, first), optimizer=lambda p: torch.optim.Adam(p, 0.01), accumulate=accumulate)


def same(found: Job, wanted: Job, atol: float = 1e-10) -> None:
    mine, theirs = found.state().tensors, wanted.state().tensors
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


weights = st.none() | st.lists(st.sampled_from([0.0, 1e-12, 0.3, 1.0, 7.0]), min_size=SIZE, max_size=SIZE).filter(any)
cuts = st.lists(st.integers(0, SIZE), min_size=2, max_size=2).map(sorted)


@settings(max_examples=12)
@given(st.sampled_from(OPTIMIZERS), st.lists(st.tuples(cuts, weights), min_size=3, max_size=3), st.booleans())
def test_batches_of_a_step_equal_one_batch(optimizer, steps, weighted_ids):
    one, several = job(optimizer), job(optimizer, accumulate=3)
    wholes = [
        whole(seed, None if each is None else torch.tensor(each, dtype=torch.float64), weighted_ids=weighted_ids)
        for seed, (_, each) in enumerate(steps)
    ]
    parts = [part for (where, _), each in zip(steps, wholes, strict=True) for part in cut(each, where)]
    logits = [output.logits for output in one.run(wholes)]
    outputs = list(several.run(parts))
    assert [output.step for output in outputs] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    for step in range(3):
        own = torch.cat([output.logits for output in outputs[3 * step : 3 * step + 3]])
        torch.testing.assert_close(own, logits[step], rtol=0, atol=1e-10)
    same(several, one)


def test_each_batch_alone_would_be_another_step():
    """What is tested above is no identity."""
    one, alone = job(), job()
    list(one.run([whole(0)]))
    list(alone.run(cut(whole(0), (3, 7))))
    with pytest.raises(AssertionError):
        same(alone, one, atol=1e-4)


def test_a_model_without_tables_accumulates_too():
    def make():
        return GPT(vocabulary=20, context=8, channels=16, num_blocks=1, num_heads=2).double()

    one, several = job(make=make), job(accumulate=3, make=make)
    whole = tokens()
    list(one.run([whole]))
    list(several.run(cut(whole, (1, 2))))
    assert one.step == several.step == 1
    same(several, one)


def test_rows_that_are_not_pooled_and_frozen_tables():
    features = (*FEATURES[:2], Feature("shown", "item", "none"))
    ids = whole(4).features
    parts = [narrow(ids, 0, 5), narrow(ids, 5, 5), narrow(ids, 5, SIZE)]
    found = []
    for several in (False, True):
        bags = EmbeddingBags(tables(dtype="float64"), features, RowWiseAdaGrad(0.1))
        bags.weight("site").requires_grad_(False)
        draw = torch.Generator().manual_seed(5)
        looked = [bags.lookup(bags.read(part)) for part in parts]
        given = [
            Vectors(
                one.features,
                one.dims,
                torch.randn(one.pooled_BD.shape, generator=draw, dtype=torch.float64),
                {n: torch.randn(s.shape, generator=draw, dtype=torch.float64) for n, s in one.sequences.items()},
            )
            for one in looked
        ]
        if several:
            bags.update(*bags.concat_micro_batches(list(zip(parts, given, strict=True)), 0.5))
        else:
            scales = (0.5, 0.5, 1.0)
            pooled = torch.cat([one.pooled_BD * scale for one, scale in zip(given, scales, strict=True)])
            shown = torch.cat([one.sequences["shown"] * scale for one, scale in zip(given, scales, strict=True)])
            bags.update(bags.read(concat(parts)), bags.vectors(pooled, [shown]))
        found.append([bags.weight(name).detach().clone() for name in ("site", "item")])
    assert all(map(torch.equal, *found))


def test_bags_of_calls_join_feature_by_feature():
    one = Ids(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3, 3]), torch.tensor([0.1, 0.2, 0.3]), [0, 1], [0, 0])
    other = Ids(torch.tensor([4, 5]), torch.tensor([0, 1, 2]), torch.tensor([0.4, 0.5]), [0, 1], [0, 0])
    found = concat_ids([one, other])
    assert found.values.tolist() == [1, 2, 4, 3, 5] and found.offsets.tolist() == [0, 1, 2, 3, 4, 4, 5]
    assert found.weights is not None
    torch.testing.assert_close(found.weights, torch.tensor([0.1, 0.2, 0.4, 0.3, 0.5]))
    with pytest.raises(UserError, match="weights in some batches and none in others"):
        concat_ids([one, replace(other, weights=None)])


def test_the_last_step_takes_what_is_left():
    one, several = job(), job(accumulate=4)
    list(one.run([whole(0), whole(1)]))
    parts = [*cut(whole(0), (2, 3, 9)), *cut(whole(1), (5,))]
    assert [output.step for output in several.run(parts)] == [0, 0, 0, 1, 1, 2]
    same(several, one)


def test_a_step_that_was_left_is_forgotten():
    several, one = job(accumulate=2), job(accumulate=2)
    for output in several.run([whole(0), whole(1), whole(2), whole(3)]):
        if output.step == 1 and several._step.accumulation.is_last is False:
            with pytest.raises(UserError, match="inside step 2; continue job.run until job.step increases"):
                several.state()
            with pytest.raises(UserError, match="inside step 2"):
                several.load_state(one.state())
            break
    list(one.run([whole(0), whole(1)]))
    same(several, one)
    for each in (several, one):
        list(each.run([whole(4), whole(5)]))
    same(several, one)


def test_what_cannot_accumulate_is_refused():
    with pytest.raises(UserError, match="accumulate=0; allowed: 1 or more micro-batches"):
        job(accumulate=0)
    with pytest.raises(UserError, match="accumulate is for job.run"):
        next(job(accumulate=2).loader([whole(0)]))
    none = torch.zeros(SIZE, dtype=torch.float64)
    with pytest.raises(UserError, match="sample weights: all of a step are 0"):
        list(job(accumulate=2).run([whole(0, none), whole(1, none)]))
    with pytest.raises(UserError, match="sample weights: all are 0"):
        list(job().run([whole(0, none)]))


def stream_job(batch_size: int, dtype: str, accumulate: int) -> tuple[list[float], Job]:
    torch.manual_seed(1)
    stream = ClickStream()
    bags = EmbeddingBags(
        [Table(name, rows, 4, dtype) for name, rows, _ in stream.features],  # pyright: ignore[reportArgumentType]
        [Feature(name, name, "mean") for name, _, _ in stream.features],
        RowWiseAdaGrad(lr=0.1),
    )
    model = DLRM(bags, stream.num_dense, bottom=[8, 4], top=[8]).to(getattr(torch, dtype))
    loader = Loader(stream, batch_size=batch_size, shuffle=False)

    def batches():
        for one in loader:
            numbers = {name: label.to(getattr(torch, dtype)) for name, label in one.labels.items()}
            yield replace(one, dense=one.numbers.to(getattr(torch, dtype)), labels=numbers)

    made = build(
        model, plan_for(model, next(batches())), optimizer=lambda p: torch.optim.Adam(p, 0.02), accumulate=accumulate
    )
    loader = Loader(stream, batch_size=batch_size, shuffle=False)
    losses = []
    for output in made.run(batches()):
        losses.append(float(output.loss))
        if output.step == 4:
            return losses, made
    raise AssertionError


def test_a_batch_of_64k_trains_and_equals_four_of_16k():
    losses, large = stream_job(65_536, "float64", 1)
    assert losses[-1] < losses[0] - 0.005
    again, four = stream_job(16_384, "float64", 4)
    means = torch.tensor(again, dtype=torch.float64).view(4, 4).mean(1).tolist()
    assert means == pytest.approx(losses, abs=1e-10)
    same(four, large)


def test_a_batch_of_64k_trains_in_float32():
    losses, _ = stream_job(65_536, "float32", 1)
    assert losses[-1] < losses[0] - 0.005
