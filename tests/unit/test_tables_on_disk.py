"""Tables with rows on disk train to the bit like tables in memory, in one process."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.embeddings.rows_folder import RowsFolder
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.kernels.cache_index import CacheIndex
from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.placements import keep_on_disk
from shardwright.runtime.planning import plan_for
from shardwright.runtime.supported import check_supported
from shardwright.spec.calls import without_leads
from shardwright.spec.optimizer import SGD, AdaGrad, Adam, RowWiseAdaGrad
from shardwright.spec.row_cache import HALF_LIFE_BATCHES, KNOWN_BATCHES
from shardwright.spec.workload import Feature, Table

FEATURES = (Feature("site", "site"), Feature("seen", "item", "mean"), Feature("shown", "item"))
ROWS = {"site": 300, "item": 200}
LINES = 128
OPTIMIZERS = (SGD(lr=0.1), SGD(lr=0.1, momentum=0.9), AdaGrad(lr=0.1), RowWiseAdaGrad(lr=0.1), Adam(lr=0.01))


def batch_of(seed: int, batch_size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3, batch_size), generator=generator)
    sizes = lengths.sum(1).tolist()
    rows = (ROWS["site"], ROWS["item"], ROWS["item"])
    values = torch.cat([torch.randint(0, num, (n,), generator=generator) for n, num in zip(sizes, rows, strict=True)])
    dense = torch.randn(batch_size, 4, generator=generator)
    click = torch.randint(0, 2, (batch_size,), generator=generator).float()
    return Batch(Jagged(("site", "seen", "shown"), values, lengths), dense, {"click": click})


def dlrm(optimizer) -> DLRM:
    torch.manual_seed(0)
    tables = [Table(name, rows, 8) for name, rows in ROWS.items()]
    return DLRM(EmbeddingBags(tables, FEATURES, optimizer), 4, bottom=(16, 8), top=(16,))


def on_disk(plan, *, lines: int = LINES, overlap: bool = True, names=tuple(ROWS)):
    plan = keep_on_disk(plan, dict.fromkeys(names, lines))
    return plan if overlap else replace(plan, stages=without_leads(plan.stages))


def job_of(optimizer, *, disk: bool, accumulate: int = 1, allow=(), **options):
    model = dlrm(optimizer)
    plan = plan_for(model, batch_of(0), allow=allow)
    plan = on_disk(plan, **options) if disk else plan
    return build(model, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), accumulate=accumulate)


def states_equal(first, second) -> bool:
    tensors = first.state().tensors, second.state().tensors
    return tensors[0].keys() == tensors[1].keys() and all(torch.equal(tensors[0][n], tensors[1][n]) for n in tensors[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("overlap", (False, True))
def test_training_equals_tables_in_memory(optimizer, overlap):
    batches = [batch_of(seed) for seed in range(20)]
    plain, disk = job_of(optimizer, disk=False), job_of(optimizer, disk=True, overlap=overlap)
    losses = [[output.loss for output in job.run(batches)] for job in (plain, disk)]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert states_equal(plain, disk)


@pytest.mark.parametrize("allow", ("tables.fp16", "tables.bf16"))
@pytest.mark.parametrize("optimizer", (OPTIMIZERS[1], OPTIMIZERS[3], OPTIMIZERS[4]), ids=str)
def test_values_of_16_bits_are_rounded_as_in_memory(optimizer, allow):
    """By the number of the row, not of its line; with other rounding they differ."""
    batches = [batch_of(seed) for seed in range(20)]
    jobs = [job_of(optimizer, disk=disk, allow=(allow,)) for disk in (False, True)]
    losses = [[output.loss for output in job.run(batches)] for job in jobs]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert states_equal(*jobs)
    (shards,) = jobs[1].model.sparse.exchange.local_shards
    assert {weight.element_size() for weight in shards.weights} == {2}


@pytest.mark.parametrize("allow, dtype", (("tables.fp16", torch.float16), ("tables.bf16", torch.bfloat16)))
def test_float32_lines_over_rows_of_16_bits_equal_float32_tables_while_all_rows_have_lines(allow, dtype):
    model = dlrm(RowWiseAdaGrad(lr=0.5))
    for name in ROWS:
        rounded = model.sparse.weight(name).detach().to(dtype)
        model.sparse.weight(name).data.copy_(rounded)
    exact = build(model, plan_for(model, batch_of(0)), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    wide = job_of(RowWiseAdaGrad(lr=0.5), disk=True, allow=(allow, "cache.fp32"), lines=512)
    batches = [batch_of(seed) for seed in range(20)]
    losses = [[output.loss for output in job.run(batches)] for job in (exact, wide)]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    tensors = exact.state().tensors, wide.state().tensors
    for name in ROWS:
        trained, stored = (state[f"model.sparse.embedding_bags.{name}.weight"] for state in tensors)
        assert stored.dtype == dtype
        spacing = torch.finfo(dtype).eps * trained.abs() + torch.finfo(dtype).smallest_normal
        assert ((stored.float() - trained).abs() <= spacing).all() and not torch.equal(stored, trained.to(dtype))
        assert torch.equal(tensors[0][f"tables.sparse.{name}.sum"], tensors[1][f"tables.sparse.{name}.sum"])


def test_float32_lines_keep_what_16_bits_lose_between_evictions(tmp_path):
    """Smaller distance to float32 tables than with lines in 16 bits."""
    batches = [batch_of(seed) for seed in range(60)]
    jobs = [
        job_of(RowWiseAdaGrad(lr=0.05), disk=True, allow=allow)
        for allow in ((), ("tables.bf16",), ("tables.bf16", "cache.fp32"))
    ]
    for job in jobs:
        for _ in job.run(batches):
            pass
    exact, narrow, wide = (job.state().tensors["model.sparse.embedding_bags.site.weight"].float() for job in jobs)
    assert (wide - exact).square().mean() < 0.9 * (narrow - exact).square().mean()
    jobs[2].save(tmp_path)
    again = job_of(RowWiseAdaGrad(lr=0.05), disk=False, allow=("tables.bf16",))
    again.load(tmp_path / "step-00000060")
    assert states_equal(jobs[2], again)


def test_tables_that_were_never_in_memory_are_initialized_when_read():
    """Models of recipes are on the meta device."""
    batches, jobs = [batch_of(seed) for seed in range(10)], []
    for disk in (False, True):
        with torch.device("meta"):
            model = dlrm(OPTIMIZERS[3])
        plan = plan_for(model, batch_of(0))
        plan = on_disk(plan) if disk else plan
        torch.manual_seed(0)
        jobs.append(build(model, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)))
    losses = [[output.loss for output in job.run(batches)] for job in jobs]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    caches = [cached for local in jobs[1].model.sparse.exchange.local_shards for cached in local.caches.values()]
    for cached in caches:
        cached.write_back()
        assert 0 < cached.store.numbers.live_records < cached.store.num_rows
    assert states_equal(*jobs)


def test_only_some_tables_may_be_on_disk():
    batches = [batch_of(seed) for seed in range(8)]
    plain, disk = job_of(OPTIMIZERS[3], disk=False), job_of(OPTIMIZERS[3], disk=True, names=("item",))
    losses = [[output.loss for output in job.run(batches)] for job in (plain, disk)]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert states_equal(plain, disk)


def test_accumulated_steps_equal_those_of_tables_in_memory():
    batches = [batch_of(seed, 4) for seed in range(18)]
    jobs = [job_of(OPTIMIZERS[3], disk=disk, accumulate=3) for disk in (False, True)]
    losses = [[output.loss for output in job.run(batches)] for job in jobs]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert states_equal(*jobs)


@pytest.mark.parametrize("overlap", (False, True))
def test_training_evicts_as_an_index_that_knows_the_next_batches(overlap):
    """Misses and written rows of each step's order of calls: prefetch i+1, expect i+4, then the update of i."""
    batches = [batch_of(seed, 12) for seed in range(40)]
    job = job_of(OPTIMIZERS[3], disk=True, overlap=overlap, lines=96)
    for _ in job.run(batches):
        pass
    index, known = (CacheIndex(96, HALF_LIFE_BATCHES, adapts=True) for _ in range(2))
    rows = [
        torch.unique(torch.cat([batch.features.values[a:b] for a, b in _ranges(batch.features.lengths)]))
        for batch in batches
    ]
    placed, released = {}, []
    ahead, start = (2 + KNOWN_BATCHES, -2 - KNOWN_BATCHES) if overlap else (0, 0)
    for tick in range(start, len(rows)):
        to_place, to_announce = tick + overlap, tick + ahead
        if not overlap:
            known.announce(rows[tick])
        if 0 <= to_place < len(rows):
            for lines in released:
                known.release(lines, written=True)
            released.clear()
            placed[to_place] = known.place(rows[to_place], announced=True).lines_U
        if overlap and 0 <= to_announce < len(rows):
            known.announce(rows[to_announce])
        if tick >= 0:
            released.append(placed.pop(tick))
    for rows_U in rows:
        index.release(index.place(rows_U).lines_U, written=True)
    counts = job.cache_counts()["item"]
    assert replace(counts, lookups=0, missing_lookups=0) == known.counts
    assert not overlap or counts.missing != index.counts.missing  # knowing later batches makes a difference


def _ranges(lengths: torch.Tensor) -> list[tuple[int, int]]:
    """Of the ids of the two features of table "item"."""
    site, seen, shown = lengths.sum(1).tolist()
    return [(site, site + seen), (site + seen, site + seen + shown)]


def test_runs_that_end_early_forget_the_batches_that_were_announced():
    job = job_of(OPTIMIZERS[3], disk=True)
    for _ in range(40):  # an index takes 31 announced batches
        for _ in job.run([batch_of(seed) for seed in range(9)]):
            break
    (shards,) = job.model.sparse.exchange.local_shards
    shards.caches[0].write_back()
    for _ in range(31):
        shards.caches[0].index.announce(torch.arange(3))


def test_evaluation_between_steps_and_a_loop_that_ends_early_hold_no_lines():
    """Lines are released: afterwards a batch may use all of them."""
    jobs = [job_of(OPTIMIZERS[3], disk=disk) for disk in (False, True)]
    outputs = []
    for job in jobs:
        found = []
        for output in job.run([batch_of(seed) for seed in range(30)]):
            found += [output.loss, *(each.loss for each in job.evaluate([batch_of(100 + len(found))] * 3))]
            if job.step == 7:
                break
        found += [output.loss for output in job.run([batch_of(seed) for seed in range(50, 70)])]
        outputs.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert states_equal(*jobs)
    (shards,) = jobs[1].model.sparse.exchange.local_shards
    every_row = torch.arange(LINES)
    shards.caches[0].write_back()  # releases all that is not in flight
    lines = shards.caches[0].index.place(every_row).lines_U
    assert len(set(lines.tolist())) == LINES


@settings(max_examples=15)
@given(data=st.data())
def test_drawn_sizes_and_batches(data):
    """Any number of lines that holds the batches in flight, overlapped or not, accumulated or not."""
    size, accumulate = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 2))
    overlap = data.draw(st.booleans())
    lines = data.draw(st.sampled_from([64, 96, 192]))
    seeds = data.draw(st.lists(st.integers(0, 5), min_size=accumulate, max_size=10))
    seeds = seeds[: len(seeds) // accumulate * accumulate]
    optimizer = data.draw(st.sampled_from(OPTIMIZERS))
    jobs = [job_of(optimizer, disk=disk, accumulate=accumulate, lines=lines, overlap=overlap) for disk in (False, True)]
    losses = [[output.loss for output in job.run([batch_of(seed, size) for seed in seeds])] for job in jobs]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert states_equal(*jobs)


def test_checkpoints_are_read_by_either_and_written_without_the_table_in_memory(tmp_path):
    batches = [batch_of(seed) for seed in range(20)]
    plain, disk, resumed = (job_of(OPTIMIZERS[4], disk=disk) for disk in (False, True, True))
    for job, name in ((plain, "plain"), (disk, "disk")):
        for _ in job.run(batches[:10]):
            pass
        job.save(tmp_path / name)
    resumed.load(tmp_path / "plain" / "step-00000010")
    again = job_of(OPTIMIZERS[4], disk=False)
    again.load(tmp_path / "disk" / "step-00000010")
    assert states_equal(plain, resumed) and states_equal(plain, again)
    losses = [[output.loss for output in job.run(batches[10:])] for job in (plain, disk, resumed, again)]
    assert all(torch.equal(loss, first) for first, *others in zip(*losses, strict=True) for loss in others)
    assert states_equal(plain, disk) and states_equal(plain, resumed) and states_equal(plain, again)


def test_increments_have_the_rows_that_changed(tmp_path):
    from shardwright.runtime.rank_group import RankGroup
    from shardwright.runtime.saving import Saver

    jobs = [job_of(OPTIMIZERS[3], disk=disk) for disk in (False, True)]
    for number, job in enumerate(jobs):
        saver = Saver(RankGroup(job.mesh), tmp_path / str(number), keep=9, increments=9, changes=job.changes)
        for step, _ in enumerate(job.run([batch_of(seed) for seed in range(9)])):
            if step % 3 == 2:
                job.save_with(saver, {})
        saver.wait()
    read = job_of(OPTIMIZERS[3], disk=True)
    read.load(tmp_path / "1" / "step-00000009")
    assert states_equal(jobs[0], read)


def test_a_loaded_table_and_one_that_was_trained_before_move_to_disk():
    model = dlrm(OPTIMIZERS[3])
    model.sparse.weight("item").data.normal_()
    wanted = model.sparse.weight("item").detach().clone()
    job = build(model, on_disk(plan_for(model, batch_of(0))), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    name = next(name for name in job.state().tensors if name.endswith("item.weight"))
    assert torch.equal(job.state().tensors[name], wanted)


def test_mistakes_are_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="do not fit in the 32 lines of the cache"):
        for _ in job_of(OPTIMIZERS[0], disk=True, lines=32).run([batch_of(seed, 64) for seed in range(3)]):
            pass
    model = dlrm(OPTIMIZERS[0])
    plan = on_disk(plan_for(model, batch_of(0)))
    replicated = replace(plan.tables[0], rects=(replace(plan.tables[0].rects[0], ranks=(0, 1)),))
    with pytest.raises(UserError, match="replicas of table .*, which has rows on disk"):
        check_supported(replace(plan, tables=(replicated, *plan.tables[1:])), model.sparse.tables)


def test_a_built_model_is_not_planned_again():
    job = job_of(OPTIMIZERS[1], disk=True)
    with pytest.raises(UserError, match="built with sharded tables or with table rows on disk .* cannot be copied"):
        plan_for(job.model, batch_of(0))


def test_folders_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = RowsFolder()
    (mine.make_subfolder() / "segment-1").write_text("rows")
    abandoned = tmp_path / "shardwright-rows-abandoned"
    abandoned.mkdir()
    (abandoned / "lock").write_text("")
    (tmp_path / "shardwright-rows-being-made").mkdir()
    other = RowsFolder()
    assert {path.name for path in tmp_path.iterdir()} == {
        mine.path.name,
        other.path.name,
        "shardwright-rows-being-made",
    }
    del mine
    assert not [*tmp_path.rglob("segment-*")]


def test_publications_and_increments_without_changes(tmp_path):
    model = dlrm(OPTIMIZERS[3])
    model.sparse.weight("item").requires_grad_(False)
    job = build(model, on_disk(plan_for(model, batch_of(0))), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    for number in range(3):
        for _ in job.run([batch_of(number)]):
            pass
        job.publish(tmp_path)
    job.publish(tmp_path / "other")
    job.publish(tmp_path / "other")


def test_another_seed_of_torch_during_training_does_not_change_initial_rows():
    jobs = []
    for disk in (False, True):
        with torch.device("meta"):
            model = dlrm(OPTIMIZERS[3])
        plan = plan_for(model, batch_of(0))
        torch.manual_seed(0)
        jobs.append(build(model, on_disk(plan) if disk else plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)))
    for job in jobs:
        for step, _ in enumerate(job.run([batch_of(seed) for seed in range(6)])):
            torch.manual_seed(100 + step)
    tables = [{n: x for n, x in job.state().tensors.items() if "random" not in n} for job in jobs]
    assert all(torch.equal(tables[0][name], tables[1][name]) for name in tables[0])


def test_after_a_failed_copy_nothing_is_trained_or_saved(tmp_path, monkeypatch):
    job = job_of(OPTIMIZERS[3], disk=True)
    for _ in job.run([batch_of(seed) for seed in range(3)]):
        pass
    cached = job.model.sparse.exchange.local_shards[0].caches[0]

    def fail(*_):
        raise UserError("the disk is full")

    monkeypatch.setattr(cached.store, "write", fail)
    for action in (lambda: job.save(tmp_path), job.state, lambda: [*job.run([batch_of(9)])]):
        with pytest.raises(UserError, match="the disk is full"):
            action()
    monkeypatch.undo()
    with pytest.raises(UserError, match="the disk is full"):
        job.save(tmp_path / "again")


def test_a_table_on_disk_that_is_not_finite_is_named():
    job = job_of(OPTIMIZERS[3], disk=True)
    cached = job.model.sparse.exchange.local_shards[0].caches[1]
    cached.write_rows(0, torch.arange(200), (0, 8), torch.full((200, 8), torch.nan))
    with pytest.raises(UserError, match=r"sparse.*item.*is not finite"):
        list(job.run([batch_of(0)]))
    with pytest.raises(UserError, match="is not finite in row 0"):
        job.check_weights()
