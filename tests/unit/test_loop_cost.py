"""What the training loop adds to a step: played beside the plan's stages, and measured on the source before a run."""

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
from shardwright.planner.step import tasks as steps
from shardwright.planner.step.loop_cost import LoopCost
from shardwright.planner.step.simulate import Task, expand_calls, simulate_calls
from shardwright.report import step_times
from shardwright.runtime.run import machine, measure_loop
from shardwright.spec.optimizer import SGD
from shardwright.spec.plan import Stage
from shardwright.spec.workload import Feature, Table

PREPARE = Stage("prepare", "prepare", (), ("rows",), 1)
READ = Stage("read", "read", ("rows",), ("batch",))
SEND = Stage("send", "wire", ("batch",), ("sent",))
WORK = Stage("work", "main", ("batch", "sent"), ("done",))


def played(seconds: dict[str, float], num_steps: int = 1, rate: float = 0.5, ranks: int = 1, taken: float = 0.0):
    stages = (PREPARE, READ, SEND, WORK)
    tasks = {stage.name: Task(seconds=seconds.get(stage.name, 0.0)) for stage in stages}
    tasks["prepare"] = replace(tasks["prepare"], shared_rate=rate)
    tasks["send"] = replace(tasks["send"], is_collective=True, compute_slowdown=taken)
    timeline = simulate_calls(expand_calls(stages, num_steps), tasks, ranks, blocking=True)
    timeline.verify()
    return timeline


def ends(timeline, name: str) -> list[float]:
    return [event.end for event in sorted(timeline.events, key=lambda one: one.step) if event.name == name]


def test_a_read_holds_up_the_ranks_thread():
    """On a CPU it runs on that thread; on a GPU beside it, one batch ahead."""
    ahead = replace(READ, reads=(), lead=1)
    tasks = {"read": Task(seconds=1.0), "work": Task(seconds=2.0)}
    stages = (ahead, replace(WORK, reads=("batch",)))
    on_cpu = simulate_calls(expand_calls(stages, 6), tasks, 1, blocking=True)
    on_gpu = simulate_calls(expand_calls(stages, 6), tasks, 1, blocking=False)
    assert simulate.steady_step_seconds(on_cpu, tail_steps=1) == pytest.approx(3.0)
    assert simulate.steady_step_seconds(on_gpu, tail_steps=1) == pytest.approx(2.0)


def test_a_worker_and_computation_have_half_the_processor_each():
    """Batch 1 is prepared (3 s) while batch 0 is computed (2 s): both at half speed for 4 s, then 1 s alone."""
    timeline = played({"prepare": 3.0, "work": 2.0}, num_steps=2)
    assert ends(timeline, "prepare") == pytest.approx([3.0, 3.0 + 4.0 + 1.0])
    assert ends(timeline, "work") == pytest.approx([3.0 + 4.0, 8.0 + 2.0])


def test_computation_goes_on_alone_once_a_batch_is_prepared():
    """2 s of work beside 0.5 s of preparation: 1 s at half speed, the other 1.5 s at full."""
    timeline = played({"prepare": 0.5, "work": 2.0}, num_steps=2)
    assert ends(timeline, "work") == pytest.approx([0.5 + 1.0 + 1.5, 3.0 + 2.0])
    assert ends(timeline, "prepare") == pytest.approx([0.5, 1.5])


def test_a_worker_is_alone_while_the_thread_waits():
    """The thread waits for a message of 4 s, in which the worker takes 1 s: nobody is held up."""
    timeline = played({"prepare": 1.0, "send": 4.0, "work": 2.0}, num_steps=3, ranks=2)
    assert simulate.steady_step_seconds(timeline, warm_steps=0) == pytest.approx(6.0)
    slowed = played({"prepare": 1.0, "send": 4.0, "work": 2.0}, num_steps=3, ranks=2, taken=0.5)
    assert simulate.steady_step_seconds(slowed, warm_steps=0) == pytest.approx(6.0)


def test_in_the_long_run_a_shared_processor_does_the_work_of_both():
    """Work of 2 s and a batch of 0.5 s on one processor take 2.5 s; with room for both, 2 s."""
    seconds = {"prepare": 0.5, "work": 2.0}
    assert simulate.steady_step_seconds(played(seconds, num_steps=8), tail_steps=1) == pytest.approx(2.5)
    assert simulate.steady_step_seconds(played(seconds, num_steps=8, rate=1.0), tail_steps=1) == pytest.approx(2.0)
    assert simulate.steady_step_seconds(played(seconds, num_steps=8, rate=0.75), tail_steps=1) == pytest.approx(
        2.0 + 0.5 / 3
    )


def test_a_worker_slower_than_the_step_is_waited_for():
    for rate in (0.5, 1.0):
        steps_ = played({"prepare": 5.0, "work": 1.0}, num_steps=8, rate=rate)
        assert simulate.steady_step_seconds(steps_, tail_steps=1) == pytest.approx(6.0 if rate == 0.5 else 5.0)


def test_ranks_share_their_own_processors_only():
    tasks = {"prepare": Task(seconds=(2.0, 0.0), shared_rate=0.5), "work": Task(seconds=2.0)}
    stages = (replace(PREPARE, lead=0), replace(WORK, reads=()))
    timeline = simulate_calls(expand_calls(stages, 1), tasks, 2, blocking=True)
    assert [event.end for event in timeline.events if event.name == "work"] == pytest.approx([4.0, 2.0])


def found():
    return make_plan(test_planner.workload((100_000, 64, 8.0), (5_000, 32, 2.0)), test_planner.cluster(2, 2)).candidate


def timeline(made, loop: LoopCost | None = None):
    return steps.predict_timeline(made.problem, made.placed, made.loads, made.ids_after, loop)


def test_a_loop_that_costs_nothing_changes_no_event():
    made = found()
    assert timeline(made, LoopCost()).events == timeline(made).events
    names = {event.name for event in timeline(made).events}
    assert not names & {"prepare", "metrics"} and "read" in names


def test_the_loop_is_in_the_predicted_step():
    made = found()
    before = step_times.mean_step_seconds(timeline(made))
    loop = LoopCost(read_seconds=before / 4, metrics_seconds=before / 8, gathered_bytes=(1 << 20, 8), batches_per_log=4)
    after = timeline(made, loop)
    after.verify()
    told = [
        primitives.collective_cost(made.problem.cluster, "all_gather", made.problem.level_names, n).seconds
        for n in (1 << 20, 8)
    ]
    parts = step_times.parts_by_name(after)
    assert parts["read"].seconds == pytest.approx(before / 4)
    assert parts["metrics"].seconds == pytest.approx(before / 8 + sum(told) / 4)
    added = parts["read"].seconds + parts["metrics"].seconds
    assert before < steps.counted_step_seconds(after) <= steps.counted_step_seconds(timeline(made)) + added * (1 + 1e-9)


def test_a_worker_on_the_same_processor_lengthens_the_predicted_step():
    made = found()
    alone = timeline(made, LoopCost(prepare_seconds=(each := steps.counted_step_seconds(timeline(made)) / 2)))
    shared = timeline(made, LoopCost(prepare_seconds=each, shared_rate=0.5))
    shared.verify()
    assert steps.counted_step_seconds(alone) == pytest.approx(steps.counted_step_seconds(timeline(made)))
    assert (
        steps.counted_step_seconds(alone)
        < steps.counted_step_seconds(shared)
        <= (steps.counted_step_seconds(alone) + each) * (1 + 1e-9)
    )
    assert step_times.parts_by_name(alone)["prepare"].seconds == pytest.approx(each)


# Measured


@dataclass(frozen=True)
class Slow:
    """Samples that each cost processor time, or only time."""

    seconds: float = 0.0
    busy: bool = True
    asked: list[int] = field(default_factory=list, repr=False)

    @property
    def size(self) -> None:
        return None

    def take(self, indices: np.ndarray) -> NumpyBatch:
        self.asked.append(int(indices.max(initial=0)))
        until = time.process_time() + self.seconds
        while self.busy and time.process_time() < until:
            pass
        time.sleep(0.0 if self.busy else self.seconds)
        num = len(indices)
        label = (indices % 2).astype(np.float32)
        return NumpyBatch(("site",), np.arange(num), np.ones((1, num), np.int64), None, {"click": label})


class Growing(Slow):
    def wait(self, num: int, pause) -> None:
        assert num <= 64, "asks for samples that may never come"


def settings(workers: int = 0, **train):
    words = [
        f"data.workers={workers}",
        "train.batch_size=64",
        "data.shuffle=false",
        *(f"train.{key}={one}" for key, one in train.items()),
    ]
    return config.load("synthetic-dlrm", words)


def measured(source, cores: float = 1.0, **how) -> LoopCost:
    return measure_loop.measure_loader_and_metrics(
        settings(**how), source, BinaryLoss("click"), num_ranks=2, cores=cores
    )


@pytest.mark.parametrize("busy", [True, False])
def test_a_slow_source_is_read_in_the_step_or_prepared_beside_it(busy):
    source = Slow(0.02, busy)
    read = measured(source)
    assert read.read_seconds >= 0.02 and read.prepare_seconds == 0
    prepared = measured(source, workers=1)
    assert prepared.prepare_seconds >= 0.02 and 0 < prepared.read_seconds < prepared.prepare_seconds
    assert prepared.shared_rate == 0.5
    roomy = measured(source, workers=1, cores=4.0)
    assert roomy.shared_rate == 1.0


def test_processor_time_takes_longer_on_a_part_of_a_core():
    whole, half = (measured(Slow(0.02), cores=cores).read_seconds for cores in (1.0, 0.25))
    assert half > 2 * whole >= 0.04


def test_metrics_are_priced_by_window():
    often, seldom = (measured(Slow(), log_every=every) for every in (1, 10))
    assert often.metrics_seconds > 0 and often.batches_per_log == 1 and seldom.batches_per_log == 10
    sizes, losses, *columns = seldom.gathered_bytes
    assert losses == 10 * 2 * 16 and columns == [4 * 640, 4 * 640] and sizes > 0
    assert measured(Slow(), log_every=100, steps=5).batches_per_log == 5
    assert measured(Slow(), log_every=5, accumulate=3).batches_per_log == 15


def test_the_dense_part_takes_what_was_measured():
    made = found()
    problem, ways = made.problem, ("forward", "backward")
    bottom, top = (
        [block for block in problem.workload.blocks if block.needs_vectors == needed] for needed in (False, True)
    )

    def seconds(of, each):
        return [block_tasks.pass_task(of, each, way).seconds_on(0) for way in ways]

    below, above = seconds(problem, bottom), seconds(problem, top)
    paced = LoopCost(bottom_seconds=(0.5 * below[0], 4 * below[1]), top_seconds=(2 * above[0], 3 * above[1]))
    assert seconds(paced.apply_measured_pace(problem), bottom) == pytest.approx([0.5 * below[0], 4 * below[1]])
    assert seconds(paced.apply_measured_pace(problem), top) == pytest.approx([2 * above[0], 3 * above[1]])
    before = step_times.mean_step_seconds(timeline(made))
    slow = LoopCost(bottom_seconds=(below[0], below[1]), top_seconds=(above[0] + before, above[1] + before))
    assert step_times.mean_step_seconds(timeline(made, slow)) > 2 * before
    assert LoopCost(bottom_seconds=(1.0, 1.0)).apply_measured_pace(problem) is problem


def test_a_bottom_without_a_price_counts_with_the_top():
    workload = found().problem.workload
    upper = [block for block in workload.blocks if block.needs_vectors]
    problem = replace(found().problem, workload=replace(workload, blocks=tuple(upper)))
    paced = LoopCost(bottom_seconds=(1.0, 2.0), top_seconds=(3.0, 4.0)).apply_measured_pace(problem)
    assert [block_tasks.pass_task(paced, upper, way).seconds_on(0) for way in ("forward", "backward")] == pytest.approx(
        [4.0, 6.0]
    )


def be_busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Busy(nn.Module):
    """A dense part that takes so long, forward, before and after it needs vectors; it draws random numbers."""

    def __init__(self, before: float, after: float) -> None:
        super().__init__()
        self.before, self.after, self.layer = before, after, nn.Linear(4, 1, device="meta")
        self.batches: list[torch.Tensor] = []

    def __deepcopy__(self, memo):
        made = Busy(self.before, self.after)
        made.batches = self.batches
        return made

    def forward(self, batch, vectors):
        self.batches.append(batch.labels["click"])
        be_busy(self.before)
        pooled = vectors.pooled_BD
        be_busy(self.after)
        return nn.functional.dropout(self.layer(pooled)).squeeze(1)


def test_the_dense_part_is_timed_on_a_copy():
    model, source, at = nn.Module(), Slow(), itertools.count()
    model.sparse = EmbeddingBags([Table("t", 10, 4)], [Feature("site", "t")], SGD(lr=0.1))
    model.dense, model.loss = Busy(0.01, 0.02), BinaryLoss("click")
    state = torch.get_rng_state()

    def make():
        return source.take(np.arange(8) * next(at))

    (before, bottom_back), (after, top_back) = measure_loop.dense_seconds(model, make, "float32", 0.5)
    assert torch.equal(torch.get_rng_state(), state) and model.dense.layer.weight.is_meta
    assert 0.02 <= before < 0.04 <= after < 0.08 and 0 <= bottom_back < 0.02 and 0 < top_back < 0.02
    first, second, *_ = model.dense.batches
    assert not torch.equal(first, second), "libraries prepare products for new shapes: each pass has its own batch"
    assert measure_loop.dense_seconds(model, make, "bfloat16", 4.0, threads=2)[1][0] < after


def test_only_batches_that_the_run_will_read_are_asked_for():
    source = Slow()
    measured(source, steps=2)
    assert len(source.asked) > 2 and max(source.asked) < 2 * 64
    measured(Growing())


def test_cores_of_a_rank(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "quota_cores", lambda: 3.0)
    monkeypatch.setattr(machine, "has_own_cgroup", lambda: False)
    assert machine.rank_cores(2) == 1.5
    monkeypatch.setattr(machine, "has_own_cgroup", lambda: True)
    assert machine.rank_cores(2) == 3.0 and machine.rank_cores(8) == 1.0
    monkeypatch.setattr(machine, "quota_cores", lambda: None)
    assert machine.rank_cores(2) == 4.0
