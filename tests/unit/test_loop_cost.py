"""The training loop's cost: simulated with the plan's stages, and measured before a run."""

import itertools
import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import test_planner
import torch
from torch import nn

from shardwright import config
from shardwright.data.sources.source import NumpyBatch
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss
from shardwright.planner.plan import make_plan
from shardwright.planner.price import primitives
from shardwright.planner.step import block_tasks, simulate
from shardwright.planner.step.loop_cost import LoopCost
from shardwright.planner.step.prediction import counted_step_seconds, predict_timeline
from shardwright.planner.step.rank_calls import Task, expand_calls
from shardwright.planner.step.simulate import simulate_calls
from shardwright.report import step_times
from shardwright.runtime.run import machine, measure_loop
from shardwright.spec.optimizer import SGD
from shardwright.spec.plan import Stage
from shardwright.spec.workload import Feature, Table

PREPARE = Stage("prepare", "prepare", (), ("rows",), 1)
READ = Stage("read", "read", ("rows",), ("batch",))
SEND = Stage("send", "wire", ("batch",), ("sent",))
WORK = Stage("work", "main", ("batch", "sent"), ("done",))


def simulated(seconds: dict[str, float], num_steps: int = 1, rate: float = 0.5, ranks: int = 1, slowdown: float = 0.0):
    stages = (PREPARE, READ, SEND, WORK)
    tasks = {stage.name: Task(seconds=seconds.get(stage.name, 0.0)) for stage in stages}
    tasks["prepare"] = replace(tasks["prepare"], shared_rate=rate)
    tasks["send"] = replace(tasks["send"], is_collective=True, compute_slowdown=slowdown)
    timeline = simulate_calls(expand_calls(stages, num_steps), tasks, ranks, blocking=True)
    timeline.verify()
    return timeline


def end_times(timeline, name: str) -> list[float]:
    return [event.end for event in sorted(timeline.events, key=lambda event: event.step) if event.name == name]


def test_reading_blocks_the_ranks_thread():
    """On a CPU it runs on that thread; on a GPU it overlaps, one batch ahead."""
    read_ahead = replace(READ, reads=(), lead=1)
    tasks = {"read": Task(seconds=1.0), "work": Task(seconds=2.0)}
    stages = (read_ahead, replace(WORK, reads=("batch",)))
    on_cpu = simulate_calls(expand_calls(stages, 6), tasks, 1, blocking=True)
    on_gpu = simulate_calls(expand_calls(stages, 6), tasks, 1, blocking=False)
    assert simulate.steady_step_seconds(on_cpu, tail_steps=1) == pytest.approx(3.0)
    assert simulate.steady_step_seconds(on_gpu, tail_steps=1) == pytest.approx(2.0)


def test_a_worker_and_computation_share_a_processor_equally():
    """Batch 1 is prepared (3 s) during batch 0 (2 s): both at half speed for 4 s, then 1 s alone."""
    timeline = simulated({"prepare": 3.0, "work": 2.0}, num_steps=2)
    assert end_times(timeline, "prepare") == pytest.approx([3.0, 3.0 + 4.0 + 1.0])
    assert end_times(timeline, "work") == pytest.approx([3.0 + 4.0, 8.0 + 2.0])


def test_computation_has_the_processor_once_a_batch_is_prepared():
    """2 s of work overlap with 0.5 s of preparation: 1 s at half speed, the other 1.5 s at full speed."""
    timeline = simulated({"prepare": 0.5, "work": 2.0}, num_steps=2)
    assert end_times(timeline, "work") == pytest.approx([0.5 + 1.0 + 1.5, 3.0 + 2.0])
    assert end_times(timeline, "prepare") == pytest.approx([0.5, 1.5])


def test_a_worker_has_the_processor_while_the_thread_waits():
    """The thread waits 4 s for a message, while the worker takes 1 s: neither delays the other."""
    timeline = simulated({"prepare": 1.0, "send": 4.0, "work": 2.0}, num_steps=3, ranks=2)
    assert simulate.steady_step_seconds(timeline, warm_steps=0) == pytest.approx(6.0)
    slowed = simulated({"prepare": 1.0, "send": 4.0, "work": 2.0}, num_steps=3, ranks=2, slowdown=0.5)
    assert simulate.steady_step_seconds(slowed, warm_steps=0) == pytest.approx(6.0)


def test_steps_on_a_shared_processor_take_the_sum_of_both():
    """Work of 2 s and a batch of 0.5 s take 2.5 s on one processor, and 2 s on two."""
    seconds = {"prepare": 0.5, "work": 2.0}
    assert simulate.steady_step_seconds(simulated(seconds, num_steps=8), tail_steps=1) == pytest.approx(2.5)
    assert simulate.steady_step_seconds(simulated(seconds, num_steps=8, rate=1.0), tail_steps=1) == pytest.approx(2.0)
    partly = simulate.steady_step_seconds(simulated(seconds, num_steps=8, rate=0.75), tail_steps=1)
    assert partly == pytest.approx(2.0 + 0.5 / 3)


def test_the_step_waits_for_a_slower_worker():
    for rate in (0.5, 1.0):
        timeline = simulated({"prepare": 5.0, "work": 1.0}, num_steps=8, rate=rate)
        assert simulate.steady_step_seconds(timeline, tail_steps=1) == pytest.approx(6.0 if rate == 0.5 else 5.0)


def test_ranks_do_not_share_processors():
    tasks = {"prepare": Task(seconds=(2.0, 0.0), shared_rate=0.5), "work": Task(seconds=2.0)}
    stages = (replace(PREPARE, lead=0), replace(WORK, reads=()))
    timeline = simulate_calls(expand_calls(stages, 1), tasks, 2, blocking=True)
    assert [event.end for event in timeline.events if event.name == "work"] == pytest.approx([4.0, 2.0])


def make_candidate():
    workload = test_planner.make_workload((100_000, 64, 8.0), (5_000, 32, 2.0))
    return make_plan(workload, test_planner.make_cluster(2, 2)).candidate


def timeline(candidate, loop: LoopCost | None = None):
    return predict_timeline(candidate.problem, candidate.placed, candidate.loads, candidate.ids_after, loop)


def test_a_loop_without_cost_changes_no_event():
    candidate = make_candidate()
    assert timeline(candidate, LoopCost()).events == timeline(candidate).events
    names = {event.name for event in timeline(candidate).events}
    assert not names & {"prepare", "metrics"} and "read" in names


def test_the_predicted_step_includes_the_loop():
    candidate = make_candidate()
    before = step_times.mean_step_seconds(timeline(candidate))
    loop = LoopCost(read_seconds=before / 4, metrics_seconds=before / 8, gathered_bytes=(1 << 20, 8), batches_per_log=4)
    after = timeline(candidate, loop)
    after.verify()
    gather_seconds = sum(
        primitives.collective_cost(candidate.problem.cluster, "all_gather", candidate.problem.level_names, n).seconds
        for n in (1 << 20, 8)
    )
    parts = step_times.parts_by_name(after)
    assert parts["read"].seconds == pytest.approx(before / 4)
    assert parts["metrics"].seconds == pytest.approx(before / 8 + gather_seconds / 4)
    limit = (parts["read"].seconds + parts["metrics"].seconds) * (1 + 1e-9)
    assert before < counted_step_seconds(after) <= counted_step_seconds(timeline(candidate)) + limit


def test_a_worker_on_the_same_processor_lengthens_the_predicted_step():
    candidate = make_candidate()
    seconds = counted_step_seconds(timeline(candidate)) / 2
    separate = timeline(candidate, LoopCost(prepare_seconds=seconds))
    contended = timeline(candidate, LoopCost(prepare_seconds=seconds, shared_rate=0.5))
    contended.verify()
    assert counted_step_seconds(separate) == pytest.approx(counted_step_seconds(timeline(candidate)))
    assert (
        counted_step_seconds(separate)
        < counted_step_seconds(contended)
        <= (counted_step_seconds(separate) + seconds) * (1 + 1e-9)
    )
    assert step_times.parts_by_name(separate)["prepare"].seconds == pytest.approx(seconds)


# Measurements


@dataclass(frozen=True)
class SlowSource:
    """A source where reading takes processor time, or only wall time."""

    seconds: float = 0.0
    busy: bool = True
    max_indices: list[int] = field(default_factory=list, repr=False)

    @property
    def size(self) -> None:
        return None

    def take(self, indices: np.ndarray) -> NumpyBatch:
        self.max_indices.append(int(indices.max(initial=0)))
        end = time.process_time() + self.seconds
        while self.busy and time.process_time() < end:
            pass
        time.sleep(0.0 if self.busy else self.seconds)
        size = len(indices)
        label = (indices % 2).astype(np.float32)
        return NumpyBatch(("site",), np.arange(size), np.ones((1, size), np.int64), None, {"click": label})


class GrowingSource(SlowSource):
    def wait(self, num: int, pause) -> None:
        assert num <= 64, "waits for samples that may never be written"


def settings(workers: int = 0, **train):
    overrides = [
        f"data.workers={workers}",
        "train.batch_size=64",
        "data.shuffle=false",
        *(f"train.{key}={value}" for key, value in train.items()),
    ]
    return config.load("synthetic-dlrm", overrides)


def measure(source, cores: float = 1.0, **options) -> LoopCost:
    return measure_loop.measure_loader_and_metrics(
        settings(**options), source, BinaryLoss("click"), num_ranks=2, cores=cores
    )


@pytest.mark.parametrize("busy", [True, False])
def test_a_slow_source_is_read_in_the_step_or_prepared_by_workers(busy):
    source = SlowSource(0.02, busy)
    without_worker = measure(source)
    assert without_worker.read_seconds >= 0.02 and without_worker.prepare_seconds == 0
    with_worker = measure(source, workers=1)
    assert with_worker.prepare_seconds >= 0.02 and 0 < with_worker.read_seconds < with_worker.prepare_seconds
    assert with_worker.shared_rate == 0.5
    with_cores = measure(source, workers=1, cores=4.0)
    assert with_cores.shared_rate == 1.0


def test_processor_time_takes_longer_on_a_fraction_of_a_core():
    full, quarter = (measure(SlowSource(0.02), cores=cores).read_seconds for cores in (1.0, 0.25))
    assert quarter > 2 * full >= 0.04


def test_metrics_are_priced_per_logging_window():
    often, seldom = (measure(SlowSource(), log_every=every) for every in (1, 10))
    assert often.metrics_seconds > 0 and often.batches_per_log == 1 and seldom.batches_per_log == 10
    sizes, losses, *columns = seldom.gathered_bytes
    assert losses == 10 * 2 * 16 and columns == [4 * 640, 4 * 640] and sizes > 0
    assert measure(SlowSource(), log_every=100, steps=5).batches_per_log == 5
    assert measure(SlowSource(), log_every=5, accumulate=3).batches_per_log == 15


def test_the_dense_model_takes_its_measured_seconds():
    candidate = make_candidate()
    problem, passes = candidate.problem, ("forward", "backward")
    bottom, top = (
        [block for block in problem.workload.blocks if block.needs_vectors == needed] for needed in (False, True)
    )

    def seconds(problem, blocks):
        return [block_tasks.pass_task(problem, blocks, pass_).seconds_on(0) for pass_ in passes]

    below, above = seconds(problem, bottom), seconds(problem, top)
    loop = LoopCost(bottom_seconds=(0.5 * below[0], 4 * below[1]), top_seconds=(2 * above[0], 3 * above[1]))
    assert seconds(loop.apply_measured_pace(problem), bottom) == pytest.approx([0.5 * below[0], 4 * below[1]])
    assert seconds(loop.apply_measured_pace(problem), top) == pytest.approx([2 * above[0], 3 * above[1]])
    before = step_times.mean_step_seconds(timeline(candidate))
    slow = LoopCost(bottom_seconds=(below[0], below[1]), top_seconds=(above[0] + before, above[1] + before))
    assert step_times.mean_step_seconds(timeline(candidate, slow)) > 2 * before
    assert LoopCost(bottom_seconds=(1.0, 1.0)).apply_measured_pace(problem) is problem


@pytest.mark.parametrize("policy", ["nothing", "products"])
def test_measured_backward_passes_have_what_is_recomputed(policy):
    problem = make_candidate().problem
    upper = [block for block in problem.workload.blocks if block.needs_vectors]
    recompute = tuple((block.name, policy) for block in upper)
    problem = replace(
        problem,
        workload=replace(problem.workload, blocks=tuple(upper)),
        dense=replace(problem.dense, recompute=recompute),
    )
    assert block_tasks.backward_task(problem, upper).seconds > block_tasks.pass_task(problem, upper, "backward").seconds
    measured = LoopCost(top_seconds=(3.0, 6.0)).apply_measured_pace(problem)
    assert block_tasks.pass_task(measured, upper, "forward").seconds == pytest.approx(3.0)
    assert block_tasks.backward_task(measured, upper).seconds == pytest.approx(6.0)


def test_bottom_seconds_without_bottom_blocks_are_added_to_the_top():
    workload = make_candidate().problem.workload
    upper = [block for block in workload.blocks if block.needs_vectors]
    problem = replace(make_candidate().problem, workload=replace(workload, blocks=tuple(upper)))
    adjusted = LoopCost(bottom_seconds=(1.0, 2.0), top_seconds=(3.0, 4.0)).apply_measured_pace(problem)
    assert [
        block_tasks.pass_task(adjusted, upper, pass_).seconds_on(0) for pass_ in ("forward", "backward")
    ] == pytest.approx([4.0, 6.0])


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class BusyDense(nn.Module):
    """A dense model with dropout that computes `before` and `after` seconds around its use of vectors."""

    def __init__(self, before: float, after: float) -> None:
        super().__init__()
        self.before, self.after, self.layer = before, after, nn.Linear(4, 1, device="meta")
        self.batches: list[torch.Tensor] = []

    def __deepcopy__(self, memo):
        copy = BusyDense(self.before, self.after)
        copy.batches = self.batches
        return copy

    def forward(self, batch, vectors):
        self.batches.append(batch.labels["click"])
        spin(self.before)
        pooled = vectors.pooled_BD
        spin(self.after)
        return nn.functional.dropout(self.layer(pooled)).squeeze(1)


def test_the_dense_model_is_timed_on_a_copy():
    model, source, counter = nn.Module(), SlowSource(), itertools.count()
    model.sparse = EmbeddingBags([Table("t", 10, 4)], [Feature("site", "t")], SGD(lr=0.1))
    model.dense, model.loss = BusyDense(0.01, 0.02), BinaryLoss("click")
    state = torch.get_rng_state()

    def make():
        return source.take(np.arange(8) * next(counter))

    (before, bottom_back), (after, top_back) = measure_loop.dense_seconds(model, make, "float32", 0.5)
    assert torch.equal(torch.get_rng_state(), state) and model.dense.layer.weight.is_meta
    assert 0.02 <= before < 0.04 <= after < 0.08 and 0 <= bottom_back < 0.02 and 0 < top_back < 0.02
    first, second, *_ = model.dense.batches
    assert not torch.equal(first, second), "libraries prepare matmuls for new shapes, so each pass has another batch"
    assert measure_loop.dense_seconds(model, make, "bfloat16", 4.0, threads=2)[1][0] < after


def test_only_batches_of_the_run_are_read():
    source = SlowSource()
    measure(source, steps=2)
    assert len(source.max_indices) > 2 and max(source.max_indices) < 2 * 64
    measure(GrowingSource())


def test_cores_of_a_rank(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "quota_cores", lambda: 3.0)
    monkeypatch.setattr(machine, "has_own_cgroup", lambda: False)
    assert machine.rank_cores(2) == 1.5
    monkeypatch.setattr(machine, "has_own_cgroup", lambda: True)
    assert machine.rank_cores(2) == 3.0 and machine.rank_cores(8) == 1.0
    monkeypatch.setattr(machine, "quota_cores", lambda: None)
    assert machine.rank_cores(2) == 4.0
