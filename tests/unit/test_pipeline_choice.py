"""The planner's choice of a pipeline: cuts, memory, pins, reasons, and models that cannot be cut."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.planner.memory import budget
from shardwright.planner.pins import LayerRequest
from shardwright.planner.pipelines import balanced_cuts
from shardwright.planner.plan import make_plan
from shardwright.spec import presets
from shardwright.spec.axes import Axis
from shardwright.spec.cluster import Cluster, Level
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Product, Table, Workload

GB, TFLOP = 10**9, 10**12


def model(num_blocks: int = 8, parameters: int = 10**8, activations: int = GB, head_flops: int = 10**6) -> Workload:
    """A transformer of equal blocks at a batch of 64."""
    names = ["embed", *(f"blocks.{number}" for number in range(num_blocks)), "head"]
    flops = [10**6, *[50 * TFLOP] * num_blocks, head_flops]
    known = {"input_bytes": 10**8, "forward_bytes": 1, "backward_bytes": 1}
    blocks = (
        Block(name, parameters, 4 * parameters, size, 2 * size, activations, **known)
        for name, size in zip(names, flops, strict=True)
    )
    return Workload(version=1, batch_size=64, tables=(), features=(), statistics=(), blocks=tuple(blocks))


def cluster_of(hosts: int = 4, local: int = 2, memory: int = 80 * GB, host_rate: float = 1e9) -> Cluster:
    preset = presets.load_cluster("h200-64")
    device = replace(preset.device, tiers=(replace(preset.device.tiers[0], bytes_=memory),))
    levels = (Level("local", local, 1e-6, 100e9), Level("host", hosts, 1e-5, host_rate))
    return replace(preset, name="test", device=device, levels=levels, collectives=(), beside=())


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=9), st.integers(2, 4))
def test_cuts_are_about_as_even_as_they_can_be(seconds, num_chunks):
    num_chunks = min(num_chunks, len(seconds))
    cuts = balanced_cuts(seconds, num_chunks)
    assert sum(cuts) == len(seconds) and len(cuts) == num_chunks and min(cuts) >= 1

    def longest(bounds):
        return max(sum(seconds[start:end]) for start, end in zip((0, *bounds), (*bounds, len(seconds)), strict=True))

    bounds = [sum(cuts[: number + 1]) for number in range(num_chunks - 1)]
    best = min(map(longest, combinations(range(1, len(seconds)), num_chunks - 1)))
    assert longest(bounds) <= best * num_chunks ** (1 / 8) * (1 + 1e-9)


def test_equal_blocks_are_cut_evenly_and_a_long_head_leaves_fewer_blocks_to_the_last_rank():
    assert sorted(balanced_cuts([1.0] * 10, 4)) == [2, 2, 3, 3]
    assert balanced_cuts([1.0] * 7 + [3.0], 2) == (5, 3)
    plan = make_plan(model(3, head_flops=50 * TFLOP), cluster_of(), layers=LayerRequest(2, 8)).plan
    assert plan.pipeline is not None and plan.pipeline.blocks == (2, 1)


def reason_of(result):
    return dict(result.plan.why).get("pipeline", "")


def test_slow_links_between_hosts_make_a_pipeline_faster():
    """Data parallelism over hosts would all-reduce 4 GB of gradients over 0.1 GB/s."""
    result = make_plan(model(), cluster_of(host_rate=1e8))
    plan = result.plan
    assert plan.pipeline is not None and plan.axes[0].role == "pipe" and plan.axes[0].level == "host"
    assert plan.num_ranks == 8 and plan.dense.replicate == tuple(axis.name for axis in plan.axes if axis.role == "data")
    assert "micro-batches" in reason_of(result) and "x as long as without a pipeline" in reason_of(result)
    replace(plan, workload_digest=model().digest()).verify(model())
    free = make_plan(model(), cluster_of(host_rate=1e8), layers=LayerRequest(1))
    assert free.plan.pipeline is None and free.candidate.seconds > result.candidate.seconds
    assert reason_of(free) == ""


def test_fast_links_need_no_pipeline_and_the_reason_says_so():
    result = make_plan(model(activations=1000), cluster_of(host_rate=1e13))
    assert result.plan.pipeline is None and reason_of(result).startswith("none: with the best one (")


def test_a_model_that_fits_only_as_a_pipeline():
    """Replicated, weights, gradients and moments are 16 GB."""
    workload = model(activations=1000)
    result = make_plan(workload, cluster_of(memory=10 * GB), layers=LayerRequest(4, dense="DDP"))
    assert min(budget.memory_budget(result.candidate.problem).free_bytes) > 0
    assert reason_of(result).endswith("without a pipeline the model does not fit")
    with pytest.raises(UserError, match=r"plan\.pipeline=2 does not fit: its fullest rank needs .* or more of hbm"):
        make_plan(workload, cluster_of(memory=GB // 2), layers=LayerRequest(2))


def test_memory_limits_the_activations_in_flight():
    plain = make_plan(model(activations=32 * GB), cluster_of(), layers=LayerRequest(4, 4)).candidate.problem
    assert min(budget.memory_budget(plain).free_bytes) > 0
    tight = make_plan(model(activations=32 * GB), cluster_of(memory=16 * GB), layers=LayerRequest(4, 4)).candidate
    assert min(budget.memory_budget(tight.problem).free_bytes) > 0
    assert (tight.problem.dense, tight.problem.pipeline) != (plain.dense, plain.pipeline)


def test_pins():
    result = make_plan(model(), cluster_of(), layers=LayerRequest(2, 4))
    assert result.plan.num_pipeline_ranks == 2 and result.plan.pipeline.micro_batches == 4
    assert reason_of(result).startswith("as pinned, ")
    sharded = make_plan(model(), cluster_of(), layers=LayerRequest(4, dense="FSDP")).plan
    assert sharded.dense.shard and sharded.num_pipeline_ranks == 4
    assert {axis.role for axis in sharded.axes} == {"pipe", "data"} and Axis("pipe", "host", 4) in sharded.axes


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (LayerRequest(16), "plan.pipeline=16: the model has 8 blocks, and each rank needs one or more"),
        (LayerRequest(3), r"plan.pipeline=3 divides no level of test \(local 2, host 4\)"),
        (LayerRequest(0, 8), "plan.micro_batches=8 is for a pipeline: set plan.pipeline=2 or more"),
        (LayerRequest(2, 65), "plan.micro_batches=65: a rank has only 16 samples of a batch"),
    ],
)
def test_pins_that_no_plan_can_have(request_, message):
    with pytest.raises(UserError, match=message):
        make_plan(model(), cluster_of(), layers=request_)


def test_models_that_cannot_be_cut():
    workload = model()
    head = replace(workload.blocks[-1], parameters=100, forward_products=(Product(64, 1000, 50_000, 1, "m"),))
    tied = replace(workload, blocks=(*workload.blocks[:-1], head))
    tables = replace(
        workload,
        tables=(Table("t", 1000, 16),),
        features=(Feature("t", "t"),),
        statistics=(FeatureStatistics("t", 1.0, 1.0),),
    )
    other = replace(workload, blocks=(*workload.blocks, Block("tower", 1, 4, 1, 2, 1)))
    for cannot, reason in ((tied, "its head multiplies by a weight of another block"), (other, 'its block "tower"')):
        result = make_plan(cannot, cluster_of())
        assert result.plan.pipeline is None and reason_of(result) == ""
        with pytest.raises(UserError, match=f"plan.pipeline=2: this model cannot be a pipeline: {reason}"):
            make_plan(cannot, cluster_of(), layers=LayerRequest(2))
    with pytest.raises(UserError, match="cannot be a pipeline: it has embedding tables"):
        make_plan(tables, cluster_of(), layers=LayerRequest(2))


def test_a_small_model_has_no_pipeline_unless_pinned():
    small = model(parameters=1000, activations=1000)
    result = make_plan(small, cluster_of())
    assert result.plan.pipeline is None and reason_of(result) == ""
    assert make_plan(small, cluster_of(), layers=LayerRequest(2)).plan.pipeline is not None
