"""Tables that grow, in one process, against tables that have a row for every id from the start."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.embeddings.update import _update_columns
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.kernels.arguments import TableState
from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.placements import keep_on_disk
from shardwright.runtime.planning import plan_for
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.saving import Saver
from shardwright.serving.export import export
from shardwright.serving.predictor import Predictor
from shardwright.spec.calls import without_leads
from shardwright.spec.optimizer import SGD, AdaGrad, Adam, RowWiseAdaGrad
from shardwright.spec.workload import Feature, Growth, Table

FEATURES = (Feature("site", "site"), Feature("seen", "item", "mean"), Feature("shown", "item"))
ALL_IDS = torch.randint(-(2**63), 2**63 - 1, (150,), generator=torch.Generator().manual_seed(5)).unique()
OPTIMIZERS = (SGD(lr=0.1), SGD(lr=0.1, momentum=0.9), AdaGrad(lr=0.1), RowWiseAdaGrad(lr=0.1), Adam(lr=0.01))
ROWS = 200


def batch_of(seed: int, batch_size: int = 8, num_ids: int = len(ALL_IDS)) -> Batch:
    """Positions in ALL_IDS for features of table "item", rows of table "site"."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3, batch_size), generator=generator)
    site, seen, shown = lengths.sum(1).tolist()
    sites = torch.randint(0, 30, (site,), generator=generator)
    items = (num_ids * torch.rand(seen + shown, generator=generator) ** 3).long()
    dense = torch.randn(batch_size, 4, generator=generator)
    click = torch.randint(0, 2, (batch_size,), generator=generator).float()
    return Batch(Jagged(("site", "seen", "shown"), torch.cat([sites, items]), lengths), dense, {"click": click})


def with_ids(batch: Batch) -> Batch:
    """The batch with ids of 64 bits in place of positions."""
    values = batch.features.values.clone()
    first = int(batch.features.lengths[0].sum())
    values[first:] = ALL_IDS[values[first:]]
    return replace(batch, features=replace(batch.features, values=values))


def dlrm(optimizer, growth: Growth | None, rows: int = ROWS) -> DLRM:
    torch.manual_seed(0)
    item = Table("item", rows if growth else len(ALL_IDS), 8, init=0.3, growth=growth)
    return DLRM(EmbeddingBags([Table("site", 30, 8), item], FEATURES, optimizer), 4, bottom=(16, 8), top=(16,))


def fixed_job(optimizer, **options):
    """The model with a row for each of ALL_IDS, with the initial values of the ids."""
    model = dlrm(optimizer, None)
    holder = model.sparse.holder("item")
    holder.weight.data.copy_(holder.row_initializer()(ALL_IDS))
    return build(model, plan_for(model, batch_of(0)), optimizer=sgd, **options)


def growing_job(optimizer, growth: Growth, *, overlap: bool = True, rows: int = ROWS, allow=(), disk=None, **options):
    """`disk`: lines of other tables, which are on disk."""
    model = dlrm(optimizer, growth, rows)
    plan = plan_for(model, with_ids(batch_of(0)), allow=allow)
    plan = keep_on_disk(plan, disk) if disk else plan
    plan = plan if overlap else replace(plan, stages=without_leads(plan.stages))
    return build(model, plan, optimizer=sgd, **options)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def growing_rows(job):
    exchange = job.model.sparse.exchange
    return [rows for local in exchange.local_shards for rows in local.growing.values()]


def values_by_id(job) -> dict[int, torch.Tensor]:
    found = {}
    for rows in growing_rows(job):
        known = rows.rows()
        for key, line in zip(known.ids_E.tolist(), known.lines_E.tolist(), strict=True):
            found[key] = rows.parts_L["weight"][line]
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("overlap", (False, True))
def test_without_ends_training_equals_a_table_with_all_rows(optimizer, overlap):
    batches = [batch_of(seed) for seed in range(20)]
    fixed, growing = fixed_job(optimizer), growing_job(optimizer, Growth(), overlap=overlap)
    losses = [[o.loss for o in fixed.run(batches)], [o.loss for o in growing.run(map(with_ids, batches))]]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    weight = fixed.model.sparse.weight("item")
    found = values_by_id(growing)
    assert 50 < len(found) <= len(ALL_IDS)
    for position, key in enumerate(ALL_IDS.tolist()):
        if key in found:
            assert torch.equal(found[key], weight[position])
    evaluated = [
        [o.logits for o in fixed.evaluate([batch_of(100)])],
        [o.logits for o in growing.evaluate([with_ids(batch_of(100))])],
    ]
    assert all(torch.equal(a, b) for a, b in zip(*evaluated, strict=True)), "ids without a row have initial values"
    assert len(values_by_id(growing)) == len(found), "evaluation makes no rows"


class Plain:
    """A model with a row for each of ALL_IDS, whose rows are set back by hand where ids are not admitted or expired."""

    def __init__(self, optimizer, growth: Growth) -> None:
        self.job, self.growth, self.batch = fixed_job(optimizer), growth, 0
        self.uses, self.last, self.admitted = {}, {}, set()
        holder = self.job.model.sparse.holder("item")
        self.tensors = [holder.weight.data, *holder.buffers()]
        self.initial = [tensor.clone() for tensor in self.tensors]

    def step(self, batch: Batch) -> torch.Tensor:
        self.batch += 1
        first = int(batch.features.lengths[0].sum())
        positions = batch.features.values[first:].tolist()
        for position in set(positions):
            expired = self.growth.expire_after and self.batch - self.last.get(position, 0) > self.growth.expire_after
            if position in self.last and expired:
                self.admitted.discard(position)
                self.uses[position] = 0
                self._set_back(position)
            aged = (self.batch - self.last.get(position, self.batch)) // self.growth.half_life
            self.uses[position] = self.uses.get(position, 0) >> aged
            self.last[position] = self.batch
        for position in positions:
            self.uses[position] += 1
        self.admitted |= {p for p in set(positions) if self.uses[p] >= self.growth.admit_after}
        (output,) = self.job.run([batch])
        for position in set(positions) - self.admitted:
            self._set_back(position)
        return output.loss

    def _set_back(self, position: int) -> None:
        for tensor, initial in zip(self.tensors, self.initial, strict=True):
            tensor[position] = initial[position]

    def rows_now(self) -> dict[int, torch.Tensor]:
        expire = self.growth.expire_after
        alive = [p for p in self.admitted if not expire or self.batch - self.last[p] <= expire]
        return {int(ALL_IDS[p]): self.tensors[0][p] for p in alive}


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_admission_and_expiry_equal_rows_set_back_by_hand(data):
    optimizer = data.draw(st.sampled_from(OPTIMIZERS))
    growth = Growth(data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0, 2, 5])), data.draw(st.integers(3, 9)))
    overlap = data.draw(st.booleans())
    batches = [batch_of(data.draw(st.integers(0, 10**6)), 6) for _ in range(data.draw(st.integers(1, 16)))]
    plain, growing = Plain(optimizer, growth), growing_job(optimizer, growth, overlap=overlap)
    losses = [o.loss for o in growing.run(map(with_ids, batches))]
    for batch, loss in zip(batches, losses, strict=True):
        assert torch.equal(plain.step(batch), loss)
    found, expected = values_by_id(growing), plain.rows_now()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_accumulated_steps_equal_those_of_a_table_with_all_rows():
    batches = [batch_of(seed, 4) for seed in range(18)]
    fixed, growing = (
        fixed_job(OPTIMIZERS[3], accumulate=3),
        growing_job(OPTIMIZERS[3], Growth(), accumulate=3),
    )
    losses = [[o.loss for o in fixed.run(batches)], [o.loss for o in growing.run(map(with_ids, batches))]]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


@pytest.mark.parametrize("growth", (Growth(), Growth(2, 6, 5)), ids=str)
def test_a_checkpoint_continues_to_the_bit(tmp_path, growth):
    batches = [with_ids(batch_of(seed)) for seed in range(30)]
    job, resumed = (growing_job(OPTIMIZERS[4], growth) for _ in range(2))
    for _ in job.run(batches[:15]):
        pass
    job.save(tmp_path)
    resumed.load(tmp_path / "step-00000015")
    in_memory = growing_job(OPTIMIZERS[4], growth)
    in_memory.load_state(job.state())
    losses = [[o.loss for o in each.run(batches[15:])] for each in (job, resumed, in_memory)]
    for other in losses[1:]:
        assert all(torch.equal(a, b) for a, b in zip(losses[0], other, strict=True))
    expected = values_by_id(job)
    for each in (resumed, in_memory):
        found = values_by_id(each)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def test_rows_on_disk_of_other_tables_do_not_place_ids_of_later_batches(tmp_path):
    """Their rows are copied one batch ahead; a checkpoint in the middle of a run has only what its batches placed."""
    growth, batches = Growth(2, 6, 5), [with_ids(batch_of(seed)) for seed in range(30)]
    plain, job, resumed = (growing_job(OPTIMIZERS[4], growth, disk=disk) for disk in (None, {"site": 32}, {"site": 32}))
    losses = [output.loss for output in plain.run(batches)]
    found = []
    for output in job.run(batches):
        found.append(output.loss)
        if job.step == 15:
            job.save(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(losses, found, strict=True))
    resumed.load(tmp_path / "step-00000015")
    after = [output.loss for output in resumed.run(batches[15:])]
    assert all(torch.equal(a, b) for a, b in zip(losses[15:], after, strict=True))


def test_increments_have_the_uses_of_rows_that_were_not_trained(tmp_path):
    """A loop that looks up a batch and does not train it uses its rows; they expire later."""
    growth = Growth(1, 4, 5)
    jobs = [growing_job(OPTIMIZERS[3], growth, overlap=False) for _ in range(3)]
    options = {"keep": 20, "changes": jobs[0].changes}
    savers = [
        Saver(RankGroup(jobs[0].mesh), tmp_path / str(number), increments=number, **options) for number in (0, 20)
    ]

    def train_and_save(seeds) -> None:
        for _ in jobs[0].run([with_ids(batch_of(seed, 4)) for seed in seeds]):
            pass
        for saver in savers:
            jobs[0].save_with(saver, {})
            saver.wait()

    train_and_save(range(4))
    for batch in jobs[0].loader([with_ids(batch_of(4))]):
        jobs[0].model(batch)
    train_and_save((5,))
    known = []
    for job, number in zip(jobs[1:], (0, 20), strict=True):
        job.load(tmp_path / str(number) / "step-00000005")
        known.append(growing_rows(job)[0].rows())
    assert all(torch.equal(a, b) for a, b in zip(*known, strict=True))


def test_increments_have_rows_that_changed_and_ids_that_ended(tmp_path):
    growth = Growth(1, 4, 5)
    job = growing_job(OPTIMIZERS[3], growth, overlap=False)
    saver = Saver(RankGroup(job.mesh), tmp_path, keep=20, increments=20, changes=job.changes)
    for step, _ in enumerate(job.run([with_ids(batch_of(seed, 4)) for seed in range(16)])):
        if step % 4 == 3:
            job.save_with(saver, {})
    saver.wait()
    read = growing_job(OPTIMIZERS[3], growth)
    read.load(tmp_path / "step-00000016")
    expected, found = values_by_id(job), values_by_id(read)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    assert len(found) < len(ALL_IDS)


@pytest.mark.parametrize("others_every", (0, 4))
def test_publications_after_more_rows_have_ended_than_are_recorded(tmp_path, others_every):
    """The ids of 65,536 ended rows are recorded, for each saver: after more, a publication must have all rows."""
    rows = 20_000
    job = growing_job(SGD(lr=0.1), Growth(half_life=5), overlap=False, rows=rows)
    published, other = tmp_path / "published", tmp_path / "other"
    one = with_ids(batch_of(0))

    def new_ids(number: int) -> Batch:
        values = torch.arange(8192 * number, 8192 * (number + 1)) * 2**40
        lengths = torch.tensor([[0] * 8, [1024] * 8, [0] * 8])
        return replace(one, features=replace(one.features, values=values, lengths=lengths))

    predictor = None
    for step, _ in enumerate(job.run([new_ids(number) for number in range(28)]), 1):
        if predictor is None:
            job.save(tmp_path / "saved")
            export(job.model, tmp_path / "saved/step-00000001", tmp_path / "served", example=one)
            job.publish(published)
            predictor = Predictor(tmp_path / "served", follow=published)
        elif step in (4, 16, 28):  # 12 batches end up to 98,304 rows
            job.publish(published)
            predictor.update()
            assert predictor.step == step
            assert torch.equal(predictor.tables.growing["item"].known_ids(), growing_rows(job)[0].rows().ids_E)
        elif others_every and step % others_every == 0:
            job.publish(other)
    assert predictor is not None and growing_rows(job)[0].ids.numbers.evicted > 2 * 65_536
    predictor.close()


def test_a_full_table_ends_the_rows_with_the_fewest_uses():
    growth = Growth(half_life=10)
    job = growing_job(OPTIMIZERS[3], growth, rows=64)
    for _ in job.run([with_ids(batch_of(seed)) for seed in range(60)]):
        pass
    (rows,) = growing_rows(job)
    assert rows.ids.numbers.rows <= 64 and rows.ids.numbers.evicted > 0
    found = values_by_id(job)
    assert {int(key) for key in ALL_IDS[:5]} <= found.keys(), "ids that come often keep their rows"


@pytest.mark.parametrize("allow", ("tables.fp16", "tables.bf16"))
def test_values_of_16_bits_do_not_depend_on_lines(allow):
    """Rounded by the id: with other rows before them, ids have other lines and equal values."""
    batches = [with_ids(batch_of(seed)) for seed in range(10)]
    jobs = [growing_job(OPTIMIZERS[3], growth, allow=(allow,)) for growth in (Growth(), Growth())]
    rows = growing_rows(jobs[1])[0]
    rows.ids.place(torch.arange(7) * 1001, training=True)
    for job in jobs:
        for _ in job.run(batches):
            pass
    found, other = map(values_by_id, jobs)
    assert all(torch.equal(found[key], other[key]) for key in found)


@pytest.mark.parametrize("optimizer", (RowWiseAdaGrad(0.1), RowWiseAdaGrad(0.1, clip=1.0)), ids=str)
def test_columns_of_16_bits_are_rounded_by_the_id(optimizer):
    """As a column shard updates them: with other lines, ids have equal values."""
    torch.manual_seed(0)
    weight, gradient, ids = torch.randn(9, 8).bfloat16(), torch.randn(9, 8), torch.randint(2**62, (9,))
    found = []
    for order in (torch.arange(9), torch.randperm(9)):
        on_lines, states, numbers = torch.empty_like(weight), torch.zeros(9), torch.empty_like(ids)
        on_lines[order], numbers[order] = weight, ids
        table = TableState(on_lines, (states,), 1, 5, row_numbers=numbers)
        rows, by_line = order.sort()
        update = _update_columns(optimizer, table, {"sum": states}, (rows, gradient[by_line]), 8)
        sums = next(update)
        with pytest.raises(StopIteration):
            for _ in range(9):
                sums = update.send(sums)
        found.append(on_lines[order])
    assert torch.equal(*found) and not torch.equal(found[0], weight)


def test_mistakes_are_named():
    growth = Growth()
    model = dlrm(OPTIMIZERS[0], growth)
    with pytest.raises(UserError, match='table "item" grows: look it up and train it in a job'):
        model(with_ids(batch_of(0)))
    with pytest.raises(UserError, match="not pooled and reads table"):
        EmbeddingBags([Table("item", 10, 8, growth=growth)], [Feature("seen", "item", "none")])
    with pytest.raises(UserError, match="at most 1,073,741,823"):
        EmbeddingBags([Table("item", 2**40, 8, growth=growth)], [Feature("seen", "item")])
    with pytest.raises(UserError, match="admit_after"):
        EmbeddingBags([Table("item", 10, 8, growth=Growth(admit_after=0))], [Feature("seen", "item")])
    with pytest.raises(UserError, match="do not fit in its 3 rows"):
        for _ in growing_job(OPTIMIZERS[0], growth, rows=3).run([with_ids(batch_of(0))]):
            pass
