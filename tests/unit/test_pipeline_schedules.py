"""Schedules of pipelines: complete, free of deadlocks, and equal to torch's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import _schedule_visualizer as visualizer
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from shardwright.planner.step.stages import pipeline_stages
from shardwright.spec.axes import Axis
from shardwright.spec.lanes import LANES, PIPELINE_LANES
from shardwright.spec.pipeline import FIRST_STAGES, SCHEDULES, rank_schedule
from shardwright.spec.plan import Pipeline, Plan


def tokens_by_rank(name, num_ranks, num_chunks, micro_batches):
    return [[*SCHEDULES[name](num_ranks, rank, num_chunks, micro_batches)] for rank in range(num_ranks)]


def bubble_passes(by_rank, num_chunks):
    """Passes that a rank waits if forward and backward take one unit each; fails on a deadlock."""
    num_ranks = len(by_rank)
    last, ends, position, clock = num_ranks * num_chunks - 1, {}, [0] * num_ranks, [0] * num_ranks
    while any(position[rank] < len(tokens) for rank, tokens in enumerate(by_rank)):
        before = sum(position)
        for rank, tokens in enumerate(by_rank):
            while position[rank] < len(tokens):
                token = tokens[position[rank]]
                number = token.chunk * num_ranks + rank
                if token.pass_ == "forward":
                    needs = [("forward", number - 1, token.micro)] if number else []
                else:
                    needs = [("forward", number, token.micro)]
                    needs += [("backward", number + 1, token.micro)] if number < last else []
                if not all(need in ends for need in needs):
                    break
                clock[rank] = max(clock[rank], *(ends[need] for need in needs), 0) + 1
                ends[token.pass_, number, token.micro] = clock[rank]
                position[rank] += 1
        assert sum(position) > before, "the ranks wait for each other"
    return max(clock) - len(by_rank[0])


shapes = st.tuples(st.integers(2, 6), st.integers(1, 4), st.integers(1, 13))


@given(shapes)
def test_every_rank_runs_each_pass_once_and_none_waits_for_ever(shape):
    num_ranks, num_chunks, micro_batches = shape
    for name in SCHEDULES:
        chunks = num_chunks if name == "interleaved" else 1
        by_rank = tokens_by_rank(name, num_ranks, chunks, micro_batches)
        passes = [(chunk, micro) for chunk in range(chunks) for micro in range(micro_batches)]
        for tokens in by_rank:
            for kind in ("forward", "backward"):
                assert sorted((t.chunk, t.micro) for t in tokens if t.pass_ == kind) == passes
            first = {(t.chunk, t.micro): position for position, t in reversed([*enumerate(tokens)])}
            assert all(tokens[position].pass_ == "forward" for position in first.values())
        bubble_passes(by_rank, chunks)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 4))
def test_the_bubble_is_that_of_the_closed_form(num_ranks, num_chunks, groups):
    name = "1f1b" if num_chunks == 1 else "interleaved"
    by_rank = tokens_by_rank(name, num_ranks, num_chunks, groups * num_ranks)
    assert bubble_passes(by_rank, num_chunks) == 2 * (num_ranks - 1)


@pytest.mark.parametrize("shape", [(2, 1, 4), (4, 1, 4), (4, 1, 9), (2, 2, 4), (4, 2, 8), (4, 3, 8)])
def test_the_order_is_that_of_torch(shape):
    num_ranks, num_chunks, micro_batches = shape
    kind, name = (Schedule1F1B, "1f1b") if num_chunks == 1 else (ScheduleInterleaved1F1B, "interleaved")
    ops = visualizer.get_schedule_ops(kind, num_ranks, micro_batches, num_chunks, add_spacing=False)
    letters = {"forward": "F", "backward": "B"}
    for rank, tokens in enumerate(tokens_by_rank(name, num_ranks, num_chunks, micro_batches)):
        ours = [f"{t.chunk * num_ranks + rank}{letters[t.pass_]}{t.micro}" for t in tokens]
        theirs = [str(op) for op in ops[rank] if op is not None]
        if num_chunks == 1 and rank == num_ranks - 1:  # torch 2.13 numbers the forward passes of this rank from 1
            ours = [
                f"{rank}F{t.micro + 1}" if t.pass_ == "forward" else text for t, text in zip(tokens, ours, strict=True)
            ]
        assert ours == [op for op in theirs if "REDUCE_GRAD" not in op]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pipeline", [Pipeline((1, 1, 1), 4), Pipeline((1,) * 6, 3, "interleaved")], ids=str)
def test_the_next_batches_are_announced_where_a_rank_waits_for_a_message(pipeline, overlap):
    axes, lanes = (Axis("pipe", "host", 3),), (*LANES, *PIPELINE_LANES)
    plan = Plan(
        version=4, workload_digest="", axes=axes, lanes=lanes, tables=(), stages=pipeline_stages(), pipeline=pipeline
    )
    for rank in range(3):
        names = [name for name, _ in rank_schedule(plan, rank, pipeline.micro_batches, overlap=overlap)]
        first, last = (names.index(FIRST_STAGES[0]), max(i for i, name in enumerate(names) if name in FIRST_STAGES))
        assert last - first + 1 == 2 * pipeline.micro_batches + 2  # read, to_device; request, lengths once
        next_pass = next(name for name in names[last:] if name.startswith(("forward", "backward", "weigh")))
        if not overlap:
            assert first == 0 and next_pass == "weigh"
        else:
            assert names[0] == "weigh" and next_pass.startswith("forward" if rank == 2 else "backward")
        assert not any(name.startswith("backward") for name in names[:first])
