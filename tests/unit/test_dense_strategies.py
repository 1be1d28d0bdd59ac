"""Parallelism strategies of the dense model: memory compared with values by hand, stages, and which one is chosen."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import make_cluster, scale_price

from shardwright.errors import UserError
from shardwright.planner import dense_strategies, reprice, search
from shardwright.planner.memory import budget, dense_model
from shardwright.planner.pins import LayerRequest
from shardwright.planner.plan import make_plan
from shardwright.planner.price import primitives
from shardwright.planner.problem import PlacedTables, Precision, Problem
from shardwright.planner.step import block_stages, block_tasks, prediction, simulate, tasks
from shardwright.planner.step.rank_calls import expand_calls
from shardwright.spec.cluster import HOST_LEVEL
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.wire import GRADIENT_BUCKET_BYTES, MAX_RECEIVED_BUCKETS
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload

LOCAL_BATCH = 16  # local batch size


def make_block(name: str, weights: int, saved: int, in_: int, out: int, peak: int, *, ranks: int, flops: int = 0):
    """A block with bytes of weights, and, per rank, of saved activations, inputs, product outputs, and at its peak."""
    sizes = {"activation_bytes": saved, "input_bytes": in_, "product_bytes": out, "peak_bytes": peak}
    sizes = {name: bytes_ * ranks for name, bytes_ in sizes.items()}
    return Block(name, weights // 4, weights, flops * ranks, 2 * flops * ranks, **sizes)


def make_workload(*blocks: Block, ranks: int = 4, rows: int = 1000) -> Workload:
    return Workload(
        version=1,
        batch_size=LOCAL_BATCH * ranks,
        tables=(Table("t", rows, 16),),
        features=(Feature("t", "t"),),
        statistics=(FeatureStatistics("t", 3.0, 0.5),),
        optimizer=RowWiseAdaGrad(lr=0.1),
        blocks=blocks,
    )


def peak_bytes(problem: Problem) -> float:
    return dense_model.total_bytes(dense_model.peak_memory(problem))


def strategy_names(workload: Workload, cluster) -> list[str]:
    return [strategy.name for strategy in dense_strategies.all_strategies(workload, cluster)]


def three_blocks(ranks: int = 4, flops: int = 10**6) -> Workload:
    return make_workload(
        make_block("a", 400, 1000, 100, 300, 1200, ranks=ranks, flops=flops),
        make_block("b", 800, 2000, 200, 600, 2400, ranks=ranks, flops=flops),
        make_block("c", 1200, 500, 50, 100, 700, ranks=ranks, flops=flops),
        ranks=ranks,
    )


def make_problem(workload: Workload, cluster, name: str) -> Problem:
    strategies = {strategy.name: strategy for strategy in dense_strategies.all_strategies(workload, cluster)}
    problem = search.define_problem(workload, cluster, workload.batch_size, Precision())
    return dense_strategies.apply_strategy(problem, strategies[name])


# By hand. Weights 400, 800, 1200. While b runs: a keeps 1000 (full 100, selective 400), b has 200 in, at most 2400.
BY_HAND = {
    # strategy: weights, two moments, gradients, gathered, in flight, activations, running block; the peak is at b
    "DDP": (2400, 4800, 2400 + 800 + 1200, 0, 0, 1000, 2600),
    "HSDP": (1200, 2400, (800 + 1200) / 2, 800 + 400, 800 + 1.5 * 1200, 1000, 2600),
    "FSDP": (600, 1200, (800 + 1200) / 4, 800 + 400, 800 + 1.5 * 1200, 1000, 2600),
    "FSDP + full": (600, 1200, (800 + 1200) / 4, 800 + 400, 800 + 1.5 * 1200, 100, 2600),
    "HSDP + selective": (1200, 2400, (800 + 1200) / 2, 800 + 400, 800 + 1.5 * 1200, 400, 2600),
    "FSDP + offload": (0, 0, (800 + 1200) / 4, 800 + 400, 800 + 1.5 * 1200, 1000, 2600),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_peak_memory_equals_values_by_hand(name):
    """On 2 hosts x 2 ranks: HSDP shards over 2 ranks, FSDP over 4."""
    problem = make_problem(three_blocks(), make_cluster(2, 2, dram=1e9), name)
    assert tuple(bytes_ for _, bytes_ in dense_model.peak_memory(problem)) == BY_HAND[name]
    assert dense_model.offloaded_bytes(problem) == (4 * 2400 / 4 if "offload" in name else 0)


def test_a_single_rank_has_no_gradient_buckets():
    problem = make_problem(three_blocks(1), make_cluster(1), "DDP")
    assert tuple(bytes_ for _, bytes_ in dense_model.peak_memory(problem)) == (2400, 4800, 800 + 1200, 0, 0, 1000, 2600)


def test_gradients_received_from_a_host_are_in_flight():
    """Of 3 other ranks, when a runs those of b and c; none are between hosts, and no more than four buckets are."""

    def in_flight(workload: Workload, cluster) -> float:
        problem = make_problem(workload, cluster, "DDP")
        assert dict(dense_model.peak_memory(problem, is_last=False))["gradients in flight"] == 0
        return dict(dense_model.peak_memory(problem))["gradients in flight"]

    assert in_flight(three_blocks(), make_cluster(4)) == 3 * (800 + 1200)
    between = make_cluster(4)
    between = replace(between, levels=(replace(between.levels[0], name=HOST_LEVEL),))
    assert in_flight(three_blocks(), between) == in_flight(three_blocks(), make_cluster(2, 2)) == 0
    large = make_workload(*(make_block(name, 10**7, 0, 0, 0, 0, ranks=4) for name in "abc"))
    assert in_flight(large, make_cluster(4)) == 3 * MAX_RECEIVED_BUCKETS * GRADIENT_BUCKET_BYTES


def test_rounded_gradients_reserve_memory_for_the_residual():
    hsdp = make_problem(three_blocks(), make_cluster(2, 2), "HSDP")
    bf16_hsdp = replace(hsdp, precision=replace(hsdp.precision, dense_gradients="bfloat16"))
    assert peak_bytes(bf16_hsdp) - peak_bytes(hsdp) == 2400 / 2
    ddp = make_problem(three_blocks(), make_cluster(2, 2), "DDP")
    assert peak_bytes(replace(ddp, precision=bf16_hsdp.precision)) - peak_bytes(ddp) == 2400


def test_strategies_are_ordered_by_their_number_of_techniques():
    names = strategy_names(three_blocks(), make_cluster(2, 2, dram=1e9))
    assert names[:8] == [
        *("DDP", "HSDP", "FSDP", "DDP + selective", "DDP + full", "DDP + offload", "HSDP + selective"),
        "FSDP + selective",
    ]
    assert names[-1] == "FSDP + full + offload" and len(names) == len(set(names)) == 18
    assert strategy_names(three_blocks(), make_cluster(2))[:2] == ["DDP", "FSDP"]
    assert strategy_names(three_blocks(), make_cluster(1)) == ["DDP", "DDP + selective", "DDP + full"]
    no_inputs = replace(three_blocks(), blocks=tuple(replace(block, input_bytes=0) for block in three_blocks().blocks))
    assert strategy_names(no_inputs, make_cluster(1)) == ["DDP"]
    three_levels = strategy_names(no_inputs, make_cluster(2, 2, 2))
    assert three_levels == ["DDP", "HSDP over level0", "HSDP over level1, level0", "FSDP"]


SIZES = st.integers(0, 10**6)
BLOCKS = st.lists(st.tuples(st.integers(1, 10**6), SIZES, SIZES, SIZES, SIZES), min_size=1, max_size=6)


def random_workload(sizes, ranks: int) -> Workload:
    blocks = [
        make_block(f"b{i}", 4 * num_weights, saved, min(in_, saved), min(out, saved), max(peak, saved), ranks=ranks)
        for i, (num_weights, saved, in_, out, peak) in enumerate(sizes)
    ]
    return make_workload(*blocks, ranks=ranks)


@settings(max_examples=60)
@given(sizes=BLOCKS, per_host=st.integers(2, 8), hosts=st.integers(2, 8))
def test_more_sharding_recomputing_or_hosts_never_takes_more_memory(sizes, per_host, hosts):
    """FSDP takes no more memory than HSDP, HSDP no more than DDP. Recomputing and offloading never take more, nor do
    more hosts with the same local batch size."""
    cluster, larger = make_cluster(per_host, hosts, dram=1e12), make_cluster(per_host, 2 * hosts, dram=1e12)
    workload, more_samples = random_workload(sizes, per_host * hosts), random_workload(sizes, 2 * per_host * hosts)
    bytes_ = {
        s.name: peak_bytes(make_problem(workload, cluster, s.name))
        for s in dense_strategies.all_strategies(workload, cluster)
    }
    for techniques in {name.partition(" ")[2] for name in bytes_}:
        ddp, hsdp, fsdp = (bytes_[f"{name} {techniques}".strip()] for name in ("DDP", "HSDP", "FSDP"))
        assert fsdp <= hsdp * (1 + 1e-9) and hsdp <= ddp * (1 + 1e-9)
    for name, size in bytes_.items():
        assert size <= bytes_[name.split(" ")[0]] * (1 + 1e-9)
        assert peak_bytes(make_problem(more_samples, larger, name)) <= size * (1 + 1e-9)


# Stages


@pytest.mark.parametrize("strategy", ["DDP", "HSDP", "FSDP", "FSDP + full + offload", "DDP + offload"])
def test_the_stages_of_every_strategy_are_in_a_valid_order(strategy):
    """Each all-gather ends before the pass that needs it; the last block is gathered once, every other block twice."""
    large = tuple(replace(block, parameter_bytes=block.parameter_bytes << 12) for block in three_blocks().blocks)
    problem = make_problem(replace(three_blocks(), blocks=large), make_cluster(2, 2, dram=1e9), strategy)
    placement = dense_strategies.place_tables_first(replace(problem, expand_blocks=False), {}).placed
    loads = tasks.rank_loads(problem, placement, [(1.0,)])
    timeline = prediction.predict_timeline(problem, placement, loads, "read")
    timeline.verify()
    events = [event for event in timeline.events if (event.rank, event.step) == (0, 4)]
    start = {event.name: event.start for event in events}
    gathers = sorted((event.name, event.end) for event in events if event.lane == "gather")
    passes = {event.name: (event.start, event.end) for event in events if event.lane == "main"}
    if strategy == "DDP":
        assert not gathers and start["reduce c"] >= passes["backward c"][1]
        assert start["reduce c"] < passes["backward a"][0]  # overlapped with the backward pass of earlier blocks
        return
    assert [name for name, _ in gathers] == [*["gather a"] * 2, *["gather b"] * 2, "gather c"]
    for name in "abc":
        ends = [end for gather, end in gathers if gather == f"gather {name}"]
        assert ends[0] <= passes[f"forward {name}"][0] and ends[-1] <= passes[f"backward {name}"][0]
    scatters = [event for event in events if event.lane == "scatter"]
    assert [event.name for event in scatters] == ([] if "DDP" in strategy else ["scatter c", "scatter b", "scatter a"])
    reduces = [event.name for event in events if event.lane == "dense"]
    assert reduces == ([] if "FSDP" in strategy else ["reduce c", "reduce b", "reduce a"])
    num_loads = sum(event.name.startswith("load") for event in events)
    assert num_loads == (5 if "offload" in strategy else 0)


def test_gathers_run_at_most_the_given_number_of_blocks_ahead():
    for ahead in (0, 1, 2):
        problem = make_problem(three_blocks(), make_cluster(2, 2), "FSDP")
        problem = replace(problem, dense=replace(problem.dense, ahead=ahead))
        forward, backward = block_stages.stage_bodies(problem)
        for body, order in ((forward, "abc"), (backward, "cba")):
            gathers = [stage.name[-1] for stage in body if stage.lane == "gather"]
            assert gathers == list(order[0 if body is forward else 1 :])
            for stage in body:
                if stage.lane == "gather" and order.index(stage.name[-1]) > ahead:
                    earlier = order[order.index(stage.name[-1]) - 1 - ahead]
                    assert any(slot.startswith(f"{earlier}.") for slot in stage.reads)


def test_bytes_that_cross_between_hosts():
    """For S bytes on H hosts: (H-1)/H S with each all-gather and reduce-scatter of FSDP, 2 (H-1)/H S with the
    all-reduce over HSDP's replicas."""
    cluster, size, hosts = make_cluster(2, 4), 1 << 20, 4
    workload = make_workload(make_block("a", size, 0, 0, 0, 0, ranks=8), ranks=8)
    fsdp, hsdp = (block_stages.body_tasks(make_problem(workload, cluster, kind), 0.0, 0.0) for kind in ("FSDP", "HSDP"))
    cost = lambda op, name, bytes_: primitives.collective_cost(cluster, op, (name,), bytes_)  # noqa: E731
    gathers = [cost("all_to_all", "level0", size), cost("all_to_all", "level1", size // 2)]
    assert fsdp["gather a"].seconds_on(0) == pytest.approx(max(gather.seconds for gather in gathers))
    assert gathers[1].bytes_ * 2 == size * (hosts - 1) // hosts  # two ranks of a host share its uplink
    assert fsdp["scatter a"].bytes_ == fsdp["gather a"].bytes_ == sum(gather.bytes_ for gather in gathers)
    assert hsdp["gather a"].levels == ("level0",) and hsdp["gather a"].bytes_ == size // 2
    assert hsdp["reduce a"].levels == ("level1",) and hsdp["reduce a"].bytes_ * 2 == 2 * size * (hosts - 1) // hosts
    assert not fsdp["reduce a"].seconds


def test_full_recomputing_adds_the_time_of_a_forward_pass():
    problems = {
        name: make_problem(three_blocks(1), make_cluster(1), name) for name in ("DDP", "DDP + selective", "DDP + full")
    }
    forward = sum(block_tasks.pass_task(problems["DDP"], [b], "forward").seconds_on(0) for b in three_blocks(1).blocks)
    seconds = {}
    for name, problem in problems.items():
        placement = dense_strategies.place_tables_first(replace(problem, expand_blocks=False), {}).placed
        seconds[name], _ = prediction.predict_step(
            problem, placement, tasks.rank_loads(problem, placement, [(1.0,)]), ("read",)
        )
    assert seconds["DDP + full"] - seconds["DDP"] == pytest.approx(forward, rel=1e-6)
    assert seconds["DDP"] < seconds["DDP + selective"] < seconds["DDP + full"]


# The choice


def large_workload(ranks: int, layers: int = 6, size: int = 4 << 20, flops: int = 10**8) -> Workload:
    blocks = [
        make_block(f"l{i}", size, 6 << 20, 1 << 20, 2 << 20, 7 << 20, ranks=ranks, flops=flops) for i in range(layers)
    ]
    return make_workload(*blocks, ranks=ranks)


def test_a_plan_has_the_fastest_strategy_that_fits():
    """As memory shrinks: first the fastest strategy, then ever smaller ones, finally an error."""
    strategies, workload = [], large_workload(4)
    for megabytes in (800, 160, 130, 90, 60, 40, 30):
        try:
            result = make_plan(workload, make_cluster(2, 2, memory_bytes=megabytes * 1e6))
        except UserError as error:
            assert "without any table" in str(error)
            strategies.append(None)
            continue
        result.plan.verify(workload)
        best, smallest = (
            dense_strategies.fastest_candidate(result.dense_candidates),
            dense_strategies.smallest_candidate(result.dense_candidates),
        )
        free_bytes = 0.9 * megabytes * 1e6
        assert sum(bytes_ for _, bytes_ in budget.memory_budget(result.candidate.problem).memory_parts) < free_bytes
        assert best is not None and smallest is not None and smallest.strategy.sort_key <= best.strategy.sort_key
        assert all(
            c.seconds >= best.seconds / (1 + dense_strategies.TIE_SHARE) for c in result.dense_candidates if c.fits
        )
        assert result.plan.dense == replace(best.strategy.dense, dtype="float32")
        assert set(block_stages.extra_lanes(result.candidate.problem)) <= set(result.plan.lanes)
        repriced = reprice.reprice_plan(result.candidate.problem, result.plan)
        assert repriced.seconds == pytest.approx(result.candidate.seconds)
        reason = dict(result.plan.why).get("dense", "")
        assert (best.strategy.name in reason) == bool(best.strategy.num_techniques)
        strategies.append(best.strategy)
    assert strategies[-1] is None and strategies[0] is not None
    assert any(s and s.dense.shard for s in strategies) and any(s and s.recompute_policy for s in strategies)


def test_a_small_dense_model_is_replicated_without_a_search():
    result = make_plan(three_blocks(), make_cluster(2, 2, memory_bytes=1e9))
    assert result.dense_candidates == () and not result.plan.dense.shard
    assert result.plan.dense.replicate == ("data@level1", "data@level0")
    assert "dense" not in dict(result.plan.why)


def test_sharding_the_dense_model_leaves_memory_for_tables():
    workload = replace(large_workload(4), tables=(Table("t", 1_200_000, 16),))
    result = make_plan(workload, make_cluster(2, 2, memory_bytes=2.2e8, dram=1e9))
    problem = result.candidate.problem
    fsdp = next(s for s in dense_strategies.all_strategies(workload, problem.cluster) if s.name == "FSDP")
    ddp = dense_strategies.all_strategies(workload, problem.cluster)[0]
    free_bytes = [budget.memory_budget(dense_strategies.apply_strategy(problem, s)).free_bytes[0] for s in (ddp, fsdp)]
    assert free_bytes[1] > free_bytes[0] + 3 * 6 * (4 << 20) / 2


@settings(max_examples=15)
@given(
    layers=st.integers(1, 5),
    weights=st.integers(1 << 12, 1 << 23),
    flops=st.integers(10**5, 10**9),
    speedup=st.floats(1.0, 10.0),
    megabytes=st.integers(80, 400),
)
def test_faster_links_or_products_never_lead_to_a_slower_choice(layers, weights, flops, speedup, megabytes):
    workload = large_workload(4, layers, weights // 4 * 4, flops)
    slow = make_cluster(2, 2, memory_bytes=megabytes * 1e6)
    links = tuple(replace(x, bytes_per_second=x.bytes_per_second * speedup) for x in slow.levels)
    prices = tuple(scale_price(x, 1 / speedup) if x.op == "matmul" else x for x in slow.device.prices)
    problem = search.define_problem(workload, slow, workload.batch_size, Precision())
    try:
        placement = dense_strategies.place_tables_first(problem, {}).placed
    except UserError:
        return
    best = dense_strategies.fastest_candidate(dense_strategies.evaluate_strategies(problem, placement))
    for cluster in (replace(slow, levels=links), replace(slow, device=replace(slow.device, prices=prices))):
        faster_best = dense_strategies.fastest_candidate(
            dense_strategies.evaluate_strategies(replace(problem, cluster=cluster), placement)
        )
        assert best is not None and faster_best is not None
        assert faster_best.seconds <= best.seconds * (1 + dense_strategies.TIE_SHARE) * (1 + 1e-9)


def test_no_deadlock_with_tables_and_blocks_on_all_lanes():
    workload = large_workload(8, 3)
    for cluster in (make_cluster(8), make_cluster(2, 4), make_cluster(2, 2, 2)):
        for strategy in dense_strategies.all_strategies(workload, cluster):
            problem = make_problem(workload, cluster, strategy.name)
            placement = dense_strategies.place_tables_first(replace(problem, expand_blocks=False), {}).placed
            assert isinstance(placement, PlacedTables)
            loads = tasks.rank_loads(problem, placement, [(1.0,)])
            calls = expand_calls(tasks.required_stages(problem, loads, "gradients"), 5)
            simulate.simulate_calls(calls, tasks.stage_tasks(problem, placement, loads), 8, blocking=False).verify()


def test_only_as_many_blocks_are_recomputed_as_memory_requires():
    """One block fewer does not fit. The paper's rule recomputes all blocks or none."""
    workload, names = large_workload(4), []
    for megabytes in range(90, 200, 5):
        cluster = make_cluster(2, 2, memory_bytes=megabytes * 1e6)
        problem = search.define_problem(workload, cluster, workload.batch_size, Precision())
        try:
            placement = dense_strategies.place_tables_first(problem, {}).placed
        except UserError:
            continue
        candidates = dense_strategies.evaluate_strategies(problem, placement)
        smallest = dense_strategies.smallest_candidate(candidates)
        assert smallest is not None and not smallest.strategy.num_recomputed
        for c in (c for c in candidates if c.strategy.num_recomputed):
            fewer = replace(c.strategy, dense=replace(c.strategy.dense, recompute=c.strategy.dense.recompute[:-1]))
            assert c.fits and not dense_strategies.evaluate_strategy(problem, placement, fewer, "read").fits
            full = next(
                o for o in candidates if (o.strategy.sort_key, o.strategy.num_recomputed) == (c.strategy.sort_key, 0)
            )
            assert c.peak_bytes >= full.peak_bytes and c.seconds <= full.seconds * (1 + 1e-9)
            names.append(c.strategy.name)
    assert any("1 of 6" in name for name in names) and len(set(names)) > 3


def test_models_without_dense_weights_have_only_ddp():
    for blocks in ((), (make_block("a", 0, 100, 10, 20, 100, ranks=4),)):
        names = strategy_names(make_workload(*blocks), make_cluster(2, 2, dram=1e9))
        assert {name.split(" ")[0] for name in names} == {"DDP"} and not any("offload" in name for name in names)


def test_blocks_that_need_no_vectors_may_be_sharded():
    independent = tuple(replace(block, needs_vectors=False) for block in three_blocks().blocks)
    problem = make_problem(replace(three_blocks(), blocks=independent), make_cluster(2, 2), "FSDP")
    placement = dense_strategies.place_tables_first(replace(problem, expand_blocks=False), {}).placed
    prediction.predict_timeline(problem, placement, tasks.rank_loads(problem, placement, [(1.0,)]), "read").verify()


def test_a_requested_strategy_is_chosen():
    """For a dense model that would otherwise use DDP; the words of the name may be in any order."""
    workload, cluster = three_blocks(), make_cluster(2, 2)
    assert make_plan(workload, cluster).plan.dense.shard == ()
    result = make_plan(workload, cluster, layers=LayerRequest(dense="full + fsdp"))
    assert result.plan.dense.shard == tuple(axis.name for axis in result.plan.axes) and not result.plan.dense.replicate
    assert [entry.block for entry in result.plan.dense.recompute] == ["a", "b", "c"]
    assert [entry.strategy.name for entry in result.dense_candidates] == ["FSDP + full"]
    assert dict(result.plan.why)["dense"].startswith("as requested, FSDP + full: ")


def test_a_requested_strategy_that_is_unknown_is_refused():
    with pytest.raises(UserError, match=r'no parallelism strategy "HSPD"; did you mean "HSDP"\?'):
        make_plan(three_blocks(), make_cluster(2, 2), layers=LayerRequest(dense="HSPD"))


def test_requested_hsdp_shards_over_the_innermost_level_or_is_fsdp():
    dense = make_plan(three_blocks(8), make_cluster(2, 2, 2), layers=LayerRequest(dense="HSDP + full")).plan.dense
    assert dense.shard == ("data@level0",) and dense.replicate == ("data@level2", "data@level1")
    assert make_plan(three_blocks(2), make_cluster(2), layers=LayerRequest(dense="hsdp")).plan.dense.shard == (
        "data@level0",
    )


def test_a_requested_strategy_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="FSDP \\+ offload, as requested, does not fit"):
        make_plan(three_blocks(), make_cluster(2, 2, dram=1000.0), layers=LayerRequest(dense="FSDP + offload"))
    assert dict(make_plan(three_blocks(), make_cluster(2, 2), layers=LayerRequest(dense="DDP")).plan.why)[
        "dense"
    ].startswith("as requested, DDP: ")
