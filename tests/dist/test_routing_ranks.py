"""Recorded routing over ranks, replicated, split, with copies and in pipelines: the rows of one process, by rank."""

from contextlib import ExitStack, chdir
from pathlib import Path

import numpy as np
import pytest
from test_expert_parallel import (
    BOTH,
    HOST,
    LOCAL,
    UNCOUPLED,
    draw_copies,
    make_model,
    single_plan_of,
    start_job,
    with_experts,
)
from test_gpt_ranks import SIZE, tokens
from test_moe_ranks import PLANS

from shardwright import config
from shardwright.report import render
from shardwright.runtime.rank_group import ONE_RANK, RankGroup
from shardwright.runtime.run import train as training
from shardwright.runtime.run.routing_recorder import RoutingRecorder
from shardwright.spec.plan import Plan
from shardwright.spec.routing import RoutedRows, read_routing

RECORDED = (1, 3, 4)  # steps
MODULES = {f"blocks.{block}.mlp" for block in range(4)}


def record_on_rank(plan: Plan, accumulate: int, decide=None) -> list[RoutedRows]:
    """What a rank records in four steps, with evaluations between them."""
    with ExitStack() as stack:
        job = start_job(stack, plan, accumulate, UNCOUPLED, decide)
        recorder = RoutingRecorder(job.model, RankGroup(job.mesh))
        index, size = plan.position(job.mesh.rank, plan.sample_axes)
        bounds = SIZE * index // size, SIZE * (index + 1) // size
        outputs, records = job.run(tokens(number, *bounds) for number in range(5 * accumulate)), []
        for step in range(1, 5):
            recorder.begin_step(is_recorded=step in RECORDED)
            for _ in range(accumulate):
                next(outputs)
            list(job.evaluate([tokens(100, *bounds)]))
            if step in RECORDED:
                records += recorder.gather(step)
        return records


def rows_of(module: str, start: int, stop: int) -> tuple[int, ...]:
    """The rows of these samples of the first batch, with the initial weights."""
    model = make_model(**UNCOUPLED)
    recorder = RoutingRecorder(model, ONE_RANK)
    recorder.begin_step(is_recorded=True)
    model(tokens(0, start, stop))
    return next(record.rows[0] for record in recorder.gather(1) if record.module == module)


CASES = [  # strategy, axes of split experts, copies: None: "even" of the plan; micro-batches
    ("DDP", (), None, 1),
    ("DDP, recomputed", (), None, 2),
    ("FSDP", (), None, 1),
    ("PP 2", (), None, 1),
    ("PP 2 x FSDP 2", (), None, 2),
    ("DDP", BOTH, None, 1),
    ("DDP, recomputed", (HOST,), draw_copies, 2),
    ("HSDP", (LOCAL,), draw_copies, 1),
    ("PP 2 x FSDP 2", (LOCAL,), None, 1),
]


@pytest.mark.parametrize(("strategy", "axes", "decide", "accumulate"), CASES)
def test_ranks_record_the_rows_of_one_process(ranks, strategy, axes, decide, accumulate):
    plan = PLANS[strategy][0]
    plan = with_experts(plan, axes, 2, "even") if axes else plan
    expected = {
        (record.step, record.module): record for record in record_on_rank(single_plan_of(UNCOUPLED), accumulate)
    }
    assert set(expected) == {(step, module) for step in RECORDED for module in MODULES}
    answers = ranks.run(
        plan.num_ranks, record_on_rank, plan, accumulate, decide, seconds=180.0
    )  # the first starts the pool
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) == len(expected)
    num_ranks = plan.num_ranks // plan.num_pipeline_ranks
    for record in answers[0]:
        single = expected[record.step, record.module]
        assert record.expert_rows == single.expert_rows and len(record.rows) == num_ranks, record
        if record.step == 1 and accumulate == 1:
            ends = [SIZE * rank // num_ranks for rank in range(num_ranks + 1)]
            for rank, rows in enumerate(record.rows):
                assert rows == rows_of(record.module, ends[rank], ends[rank + 1]), (record, rank)
        assert bool(record.computed) == bool(axes)
        if axes:
            assert [*map(sum, zip(*record.computed, strict=True))] == list(record.expert_rows)
        if axes and decide is None and accumulate == 1 and plan.pipeline is None:
            loads = [sum(row) for row in record.computed]
            assert max(loads) - min(loads) <= num_ranks, "the copies of the plan even out the ranks' rows"


SMALL = (
    *("data.length=32", "model.channels=32", "model.num_blocks=2", "model.num_heads=2", "train.batch_size=8"),
    *("train.log_every=2", "train.eval_every=0", "train.eval_samples=8", "train.checkpoint_every=4"),
    *("train.decay=none", "train.warmup=2", "model.experts.balance=0.0"),
)
SPLIT = ("plan.experts=2", "plan.expert_groups=2", "plan.expert_copies=even")


def train_on_rank(folder: str, name: str, *overrides: str) -> None:
    """A run of the recipe moe-gpt over all ranks."""
    with chdir(folder):
        training.train(config.load("moe-gpt", (*SMALL, f"run.name={name}", *overrides)))


def test_runs_over_ranks_record_and_resume(ranks, tmp_path):
    folder = str(tmp_path)
    train_on_rank(folder, "one", "train.steps=6")
    ranks.run(2, train_on_rank, folder, "replicated", "ranks=2", "plan.experts=1", "train.steps=6")
    ranks.run(2, train_on_rank, folder, "split", "ranks=2", *SPLIT, "train.steps=4")
    ranks.run(2, train_on_rank, folder, "split", "ranks=2", *SPLIT, "train.steps=6", "run.resume=true")
    one, replicated, split = (
        [*read_routing(tmp_path / f"runs/{name}/routing.jsonl")] for name in ("one", "replicated", "split")
    )
    assert [(r.step, r.module) for r in one] == [(s, f"blocks.{b}.mlp") for s in (2, 4, 6) for b in range(2)]
    for records in (replicated, split):
        assert [(r.step, r.module) for r in records] == [(r.step, r.module) for r in one]
        for mine, other in zip(records, one, strict=True):  # float32: a tie may be broken the other way
            assert np.abs(np.subtract(mine.expert_rows, other.expert_rows)).sum() <= 0.02 * sum(other.expert_rows)
    assert all(not record.computed for record in replicated) and all(record.computed for record in split)
    page = Path(render(tmp_path / "runs/split")).read_text().partition("<script")[0]
    assert "They are split over the ranks along" in page and "share of even routing, predicted" in page
    page = Path(render(tmp_path / "runs/replicated")).read_text().partition("<script")[0]
    assert "Every rank has all of them" in page
