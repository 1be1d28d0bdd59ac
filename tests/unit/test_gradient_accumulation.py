"""Gradient accumulation in one process: one step from several micro-batches equals a step on their concatenation."""

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


def full_batch(seed: int, weights: torch.Tensor | None = None, *, weighted_ids: bool = False) -> Batch:
    full = replace(batch(SIZE, seed=seed, dtype=torch.float64), weights=weights)
    if not weighted_ids:
        return full
    weights = torch.rand(len(full.features.values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return replace(full, features=replace(full.features, weights=weights))


def split_batch(full: Batch, cuts) -> list[Batch]:
    ends = [0, *cuts, full.batch_size]
    return [
        Batch(
            narrow(full.features, start, stop),
            None if full.dense is None else full.dense[start:stop],
            {name: label[start:stop] for name, label in full.labels.items()},
            None if full.weights is None else full.weights[start:stop],
        )
        for start, stop in zip(ends, ends[1:], strict=False)
    ]


def make_job(optimizer=None, accumulate: int = 1, make=None) -> Job:
    torch.manual_seed(3)
    model = dlrm(optimizer or RowWiseAdaGrad(0.1), "float64") if make is None else make()
    first = full_batch(0) if make is None else tokens()
    return build(model, plan_for(model, first), optimizer=lambda p: torch.optim.Adam(p, 0.01), accumulate=accumulate)


def assert_same_state(job: Job, reference: Job, atol: float = 1e-10) -> None:
    actual, expected = job.state().tensors, reference.state().tensors
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


weights = st.none() | st.lists(st.sampled_from([0.0, 1e-12, 0.3, 1.0, 7.0]), min_size=SIZE, max_size=SIZE).filter(any)
cuts = st.lists(st.integers(0, SIZE), min_size=2, max_size=2).map(sorted)


@settings(max_examples=12)
@given(st.sampled_from(OPTIMIZERS), st.lists(st.tuples(cuts, weights), min_size=3, max_size=3), st.booleans())
def test_micro_batches_of_a_step_equal_one_full_batch(optimizer, steps, weighted_ids):
    single, accumulating = make_job(optimizer), make_job(optimizer, accumulate=3)
    batches = [
        full_batch(seed, None if each is None else torch.tensor(each, dtype=torch.float64), weighted_ids=weighted_ids)
        for seed, (_, each) in enumerate(steps)
    ]
    parts = [part for (ends, _), each in zip(steps, batches, strict=True) for part in split_batch(each, ends)]
    logits = [output.logits for output in single.run(batches)]
    outputs = list(accumulating.run(parts))
    assert [output.step for output in outputs] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    for step in range(3):
        step_logits = torch.cat([output.logits for output in outputs[3 * step : 3 * step + 3]])
        torch.testing.assert_close(step_logits, logits[step], rtol=0, atol=1e-10)
    assert_same_state(accumulating, single)


def test_a_step_for_each_micro_batch_gives_another_result():
    """The test above could fail: one step per micro-batch differs from one step on the full batch."""
    single, separate = make_job(), make_job()
    list(single.run([full_batch(0)]))
    list(separate.run(split_batch(full_batch(0), (3, 7))))
    with pytest.raises(AssertionError):
        assert_same_state(separate, single, atol=1e-4)


def test_a_model_without_tables_accumulates_too():
    def make():
        return GPT(vocabulary=20, context=8, channels=16, num_blocks=1, num_heads=2).double()

    single, accumulating = make_job(make=make), make_job(accumulate=3, make=make)
    full = tokens()
    list(single.run([full]))
    list(accumulating.run(split_batch(full, (1, 2))))
    assert single.step == accumulating.step == 1
    assert_same_state(accumulating, single)


def test_accumulation_with_unpooled_features_and_frozen_tables():
    features = (*FEATURES[:2], Feature("shown", "item", "none"))
    ids = full_batch(4).features
    parts = [narrow(ids, 0, 5), narrow(ids, 5, 5), narrow(ids, 5, SIZE)]
    weights_by_run = []
    for accumulate in (False, True):
        bags = EmbeddingBags(tables(dtype="float64"), features, RowWiseAdaGrad(0.1))
        bags.weight("site").requires_grad_(False)
        draw = torch.Generator().manual_seed(5)
        looked_up = [bags.lookup(bags.read(part)) for part in parts]
        gradients = [
            Vectors(
                vectors.features,
                vectors.dims,
                torch.randn(vectors.pooled_BD.shape, generator=draw, dtype=torch.float64),
                {n: torch.randn(s.shape, generator=draw, dtype=torch.float64) for n, s in vectors.sequences.items()},
            )
            for vectors in looked_up
        ]
        if accumulate:
            bags.update(*bags.exchange.concat_micro_batches(list(zip(parts, gradients, strict=True)), 0.5))
        else:
            scales = (0.5, 0.5, 1.0)
            pooled = torch.cat([grad.pooled_BD * scale for grad, scale in zip(gradients, scales, strict=True)])
            unpooled = torch.cat(
                [grad.sequences["shown"] * scale for grad, scale in zip(gradients, scales, strict=True)]
            )
            bags.update(bags.read(concat(parts)), bags.vectors(pooled, [unpooled]))
        weights_by_run.append([bags.weight(name).detach().clone() for name in ("site", "item")])
    assert all(map(torch.equal, *weights_by_run))


def test_concat_ids_orders_bags_by_feature_then_by_call():
    first = Ids(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3, 3]), torch.tensor([0.1, 0.2, 0.3]), [0, 1], [0, 0])
    second = Ids(torch.tensor([4, 5]), torch.tensor([0, 1, 2]), torch.tensor([0.4, 0.5]), [0, 1], [0, 0])
    ids = concat_ids([first, second])
    assert ids.values.tolist() == [1, 2, 4, 3, 5] and ids.offsets.tolist() == [0, 1, 2, 3, 4, 4, 5]
    assert ids.weights is not None
    torch.testing.assert_close(ids.weights, torch.tensor([0.1, 0.2, 0.4, 0.3, 0.5]))
    with pytest.raises(UserError, match="weights in some batches and none in others"):
        concat_ids([first, replace(second, weights=None)])


def test_the_last_step_takes_the_remaining_micro_batches():
    single, accumulating = make_job(), make_job(accumulate=4)
    list(single.run([full_batch(0), full_batch(1)]))
    micro_batches = [*split_batch(full_batch(0), (2, 3, 9)), *split_batch(full_batch(1), (5,))]
    assert [output.step for output in accumulating.run(micro_batches)] == [0, 0, 0, 1, 1, 2]
    assert_same_state(accumulating, single)


def test_an_interrupted_step_is_discarded():
    interrupted, reference = make_job(accumulate=2), make_job(accumulate=2)
    for output in interrupted.run([full_batch(0), full_batch(1), full_batch(2), full_batch(3)]):
        if output.step == 1 and interrupted._step.inside_step:
            with pytest.raises(UserError, match="inside step 2; continue job.run until job.step increases"):
                interrupted.state()
            with pytest.raises(UserError, match="inside step 2"):
                interrupted.load_state(reference.state())
            break
    list(reference.run([full_batch(0), full_batch(1)]))
    assert_same_state(interrupted, reference)
    for continued in (interrupted, reference):
        list(continued.run([full_batch(4), full_batch(5)]))
    assert_same_state(interrupted, reference)


def test_invalid_accumulation_is_refused():
    with pytest.raises(UserError, match="accumulate=0; allowed: 1 or more micro-batches"):
        make_job(accumulate=0)
    with pytest.raises(UserError, match="accumulate is for job.run"):
        next(make_job(accumulate=2).loader([full_batch(0)]))
    zeros = torch.zeros(SIZE, dtype=torch.float64)
    with pytest.raises(UserError, match="sample weights: all of a step are 0"):
        list(make_job(accumulate=2).run([full_batch(0, zeros), full_batch(1, zeros)]))
    with pytest.raises(UserError, match="sample weights: all are 0"):
        list(make_job().run([full_batch(0, zeros)]))


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
        for raw_batch in loader:
            labels = {name: label.to(getattr(torch, dtype)) for name, label in raw_batch.labels.items()}
            yield replace(raw_batch, dense=raw_batch.numbers.to(getattr(torch, dtype)), labels=labels)

    job = build(
        model, plan_for(model, next(batches())), optimizer=lambda p: torch.optim.Adam(p, 0.02), accumulate=accumulate
    )
    loader = Loader(stream, batch_size=batch_size, shuffle=False)
    losses = []
    for output in job.run(batches()):
        losses.append(float(output.loss))
        if output.step == 4:
            return losses, job
    raise AssertionError


def test_a_batch_of_64k_trains_and_equals_four_of_16k():
    losses, large = stream_job(65_536, "float64", 1)
    assert losses[-1] < losses[0] - 0.005
    micro_losses, accumulating = stream_job(16_384, "float64", 4)
    means = torch.tensor(micro_losses, dtype=torch.float64).view(4, 4).mean(1).tolist()
    assert means == pytest.approx(losses, abs=1e-10)
    assert_same_state(accumulating, large)


def test_a_batch_of_64k_trains_in_float32():
    losses, _ = stream_job(65_536, "float32", 1)
    assert losses[-1] < losses[0] - 0.005
