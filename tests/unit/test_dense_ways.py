"""Ways to hold the dense part: their bytes by hand, their stages, what they take, and which of them a plan has."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import cluster, scaled

from shardwright.errors import UserError
from shardwright.planner import dense_strategies, reprice, search
from shardwright.planner.memory import budget, dense_model
from shardwright.planner.plan import make_plan
from shardwright.planner.price import primitives
from shardwright.planner.problem import PlacedTables, Precision, Problem
from shardwright.planner.step import block_stages, block_tasks, simulate, tasks
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload

OWN = 16  # samples of a rank


def block(name: str, weights: int, kept: int, called: int, products: int, most: int, *, ranks: int, flops: int = 0):
    """Bytes of weights, and, of a rank, of what it keeps, is called with, its products give, and is there at most."""
    sizes = {"activation_bytes": kept, "input_bytes": called, "product_bytes": products, "peak_bytes": most}
    sizes = {name: bytes_ * ranks for name, bytes_ in sizes.items()}
    return Block(name, weights // 4, weights, flops * ranks, 2 * flops * ranks, **sizes)


def workload(*given: Block, ranks: int = 4, rows: int = 1000) -> Workload:
    return Workload(
        version=1,
        batch_size=OWN * ranks,
        tables=(Table("t", rows, 16),),
        features=(Feature("t", "t"),),
        statistics=(FeatureStatistics("t", 3.0, 0.5),),
        optimizer=RowWiseAdaGrad(lr=0.1),
        blocks=given,
    )


def three(ranks: int = 4, flops: int = 10**6) -> Workload:
    return workload(
        block("a", 400, 1000, 100, 300, 1200, ranks=ranks, flops=flops),
        block("b", 800, 2000, 200, 600, 2400, ranks=ranks, flops=flops),
        block("c", 1200, 500, 50, 100, 700, ranks=ranks, flops=flops),
        ranks=ranks,
    )


def posed(work: Workload, where, way: str) -> Problem:
    known = {one.name: one for one in dense_strategies.all_strategies(work, where)}
    return dense_strategies.apply_strategy(search.define_problem(work, where, work.batch_size, Precision()), known[way])


# By hand. Weights 400, 800, 1200; of b at work: a keeps 1000 (full 100, selective 400), b is 200 and at most 2400.
BY_HAND = {
    # way: weights, two moments, gradients, gathered, on their way, kept, at work; the fullest is at b
    "DDP": (2400, 4800, 2400 + 800 + 1200, 0, 0, 1000, 2600),
    "HSDP": (1200, 2400, (800 + 1200) / 2, 800 + 400, 800 + 1.5 * 1200, 1000, 2600),
    "FSDP": (600, 1200, (800 + 1200) / 4, 800 + 400, 800 + 1.5 * 1200, 1000, 2600),
    "FSDP + full": (600, 1200, (800 + 1200) / 4, 800 + 400, 800 + 1.5 * 1200, 100, 2600),
    "HSDP + selective": (1200, 2400, (800 + 1200) / 2, 800 + 400, 800 + 1.5 * 1200, 400, 2600),
    "FSDP + offload": (0, 0, (800 + 1200) / 4, 800 + 400, 800 + 1.5 * 1200, 1000, 2600),
}


@pytest.mark.parametrize("way", BY_HAND)
def test_bytes_by_hand(way):
    """On 2 hosts x 2 ranks: HSDP cuts in 2, FSDP in 4."""
    problem = posed(three(), cluster(2, 2, slower=1e9), way)
    assert tuple(bytes_ for _, bytes_ in dense_model.peak_memory(problem)) == BY_HAND[way]
    assert dense_model.offloaded_bytes(problem) == (4 * 2400 / 4 if "offload" in way else 0)


def test_a_rank_alone_has_no_buckets():
    problem = posed(three(1), cluster(1), "DDP")
    assert tuple(bytes_ for _, bytes_ in dense_model.peak_memory(problem)) == (2400, 4800, 800 + 1200, 0, 0, 1000, 2600)


def test_what_rounding_takes_has_room():
    plain = posed(three(), cluster(2, 2), "HSDP")
    rounded = replace(plain, precision=replace(plain.precision, dense_gradients="bfloat16"))
    assert (
        dense_model.total_bytes(dense_model.peak_memory(rounded))
        - dense_model.total_bytes(dense_model.peak_memory(plain))
        == 2400 / 2
    )
    whole = posed(three(), cluster(2, 2), "DDP")
    more = dense_model.peak_memory(replace(whole, precision=rounded.precision))
    assert dense_model.total_bytes(more) - dense_model.total_bytes(dense_model.peak_memory(whole)) == 2400


def test_ways_come_smallest_first():
    names = [way.name for way in dense_strategies.all_strategies(three(), cluster(2, 2, slower=1e9))]
    assert names[:8] == [
        *("DDP", "HSDP", "FSDP", "DDP + selective", "DDP + full", "DDP + offload", "HSDP + selective"),
        "FSDP + selective",
    ]
    assert names[-1] == "FSDP + full + offload" and len(names) == len(set(names)) == 18
    assert [way.name for way in dense_strategies.all_strategies(three(), cluster(2))][:2] == ["DDP", "FSDP"]
    assert [way.name for way in dense_strategies.all_strategies(three(), cluster(1))] == [
        "DDP",
        "DDP + selective",
        "DDP + full",
    ]
    unknown = replace(three(), blocks=tuple(replace(one, input_bytes=0) for one in three().blocks))
    assert [way.name for way in dense_strategies.all_strategies(unknown, cluster(1))] == ["DDP"]
    three_levels = [way.name for way in dense_strategies.all_strategies(unknown, cluster(2, 2, 2))]
    assert three_levels == ["DDP", "HSDP over level0", "HSDP over level1, level0", "FSDP"]


SIZES = st.integers(0, 10**6)
BLOCKS = st.lists(st.tuples(st.integers(1, 10**6), SIZES, SIZES, SIZES, SIZES), min_size=1, max_size=6)


def drawn(sizes, ranks: int) -> Workload:
    made = [
        block(f"b{at}", 4 * weights, kept, min(called, kept), min(products, kept), max(most, kept), ranks=ranks)
        for at, (weights, kept, called, products, most) in enumerate(sizes)
    ]
    return workload(*made, ranks=ranks)


@settings(max_examples=60)
@given(sizes=BLOCKS, local=st.integers(2, 8), hosts=st.integers(2, 8))
def test_more_is_never_less(sizes, local, hosts):
    """FSDP takes no more than HSDP, which takes no more than DDP; recomputing and offloading never take more, nor do
    more hosts with as many samples each."""
    where, larger = cluster(local, hosts, slower=1e12), cluster(local, 2 * hosts, slower=1e12)
    few, many = drawn(sizes, local * hosts), drawn(sizes, 2 * local * hosts)
    bytes_ = {
        way.name: dense_model.total_bytes(dense_model.peak_memory(posed(few, where, way.name)))
        for way in dense_strategies.all_strategies(few, where)
    }
    for rest in {name.partition(" ")[2] for name in bytes_}:
        ddp, hsdp, fsdp = (bytes_[f"{name} {rest}".strip()] for name in ("DDP", "HSDP", "FSDP"))
        assert fsdp <= hsdp * (1 + 1e-9) and hsdp <= ddp * (1 + 1e-9)
    for name, size in bytes_.items():
        assert size <= bytes_[name.split(" ")[0]] * (1 + 1e-9)
        assert dense_model.total_bytes(dense_model.peak_memory(posed(many, larger, name))) <= size * (1 + 1e-9)


# Stages


@pytest.mark.parametrize("way", ["DDP", "HSDP", "FSDP", "FSDP + full + offload", "DDP + offload"])
def test_stages_of_every_way_are_legal(way):
    """Each gather lies before the turns it is for; the last block is gathered once, every other twice."""
    large = replace(
        three(), blocks=tuple(replace(one, parameter_bytes=one.parameter_bytes << 12) for one in three().blocks)
    )
    problem = posed(large, cluster(2, 2, slower=1e9), way)
    placed = dense_strategies.place_tables_first(replace(problem, expand_blocks=False), {}).placed
    loads = tasks.rank_loads(problem, placed, [1.0])
    played = tasks.predict_timeline(problem, placed, loads, "read")
    played.verify()
    mine = [event for event in played.events if (event.rank, event.step) == (0, 4)]
    start = {event.name: event.start for event in mine}
    gathers = sorted((event.name, event.end) for event in mine if event.lane == "gather")
    turns_of = {event.name: (event.start, event.end) for event in mine if event.lane == "main"}
    if way == "DDP":
        assert not gathers and start["reduce c"] >= turns_of["backward c"][1]
        assert start["reduce c"] < turns_of["backward a"][0]  # beside what comes behind
        return
    assert [name for name, _ in gathers] == [*["gather a"] * 2, *["gather b"] * 2, "gather c"]
    for name in "abc":
        ends = [end for gather, end in gathers if gather == f"gather {name}"]
        assert ends[0] <= turns_of[f"forward {name}"][0] and ends[-1] <= turns_of[f"backward {name}"][0]
    scattered = [event for event in mine if event.lane == "scatter"]
    assert [event.name for event in scattered] == ([] if "DDP" in way else ["scatter c", "scatter b", "scatter a"])
    reduced = [event.name for event in mine if event.lane == "dense"]
    assert reduced == ([] if "FSDP" in way else ["reduce c", "reduce b", "reduce a"])
    loaded = sum(event.name.startswith("load") for event in mine)
    assert loaded == (5 if "offload" in way else 0)


def test_only_so_many_are_gathered_ahead():
    for ahead in (0, 1, 2):
        problem = posed(three(), cluster(2, 2), "FSDP")
        problem = replace(problem, dense=replace(problem.dense, ahead=ahead))
        forward, backward = block_stages.stage_bodies(problem)
        for body, order in ((forward, "abc"), (backward, "cba")):
            gathered = [stage.name[-1] for stage in body if stage.lane == "gather"]
            assert gathered == list(order[0 if body is forward else 1 :])
            for stage in body:
                if stage.lane == "gather" and order.index(stage.name[-1]) > ahead:
                    before = order[order.index(stage.name[-1]) - 1 - ahead]
                    assert any(slot.startswith(f"{before}.") for slot in stage.reads)


def test_bytes_that_cross_between_hosts():
    """Of S bytes on H hosts: (H-1)/H S with each gather and sum of FSDP, 2 (H-1)/H S with HSDP's sum over replicas."""
    where, size, hosts = cluster(2, 4), 1 << 20, 4
    work = workload(block("a", size, 0, 0, 0, 0, ranks=8), ranks=8)
    fsdp, hsdp = (block_stages.body_tasks(posed(work, where, way), 0.0, 0.0) for way in ("FSDP", "HSDP"))
    over = lambda op, name, bytes_: primitives.collective_cost(where, op, (name,), bytes_)  # noqa: E731
    gathered = [over("all_to_all", "level0", size), over("all_to_all", "level1", size // 2)]
    assert fsdp["gather a"].seconds_on(0) == pytest.approx(max(one.seconds for one in gathered))
    assert gathered[1].bytes_ * 2 == size * (hosts - 1) // hosts  # two ranks of a host share its uplink
    assert fsdp["scatter a"].bytes_ == fsdp["gather a"].bytes_ == sum(one.bytes_ for one in gathered)
    assert hsdp["gather a"].levels == ("level0",) and hsdp["gather a"].bytes_ == size // 2
    assert hsdp["reduce a"].levels == ("level1",) and hsdp["reduce a"].bytes_ * 2 == 2 * size * (hosts - 1) // hosts
    assert not fsdp["reduce a"].seconds if "reduce a" in fsdp else True


def test_recomputing_takes_its_forward_pass_again():
    known = {way: posed(three(1), cluster(1), way) for way in ("DDP", "DDP + selective", "DDP + full")}
    forward = sum(block_tasks.pass_task(known["DDP"], [one], "forward").seconds_on(0) for one in three(1).blocks)
    seconds = {}
    for way, problem in known.items():
        placed = dense_strategies.place_tables_first(replace(problem, expand_blocks=False), {}).placed
        seconds[way], _ = tasks.predict_step(problem, placed, tasks.rank_loads(problem, placed, [1.0]), ("read",))
    assert seconds["DDP + full"] - seconds["DDP"] == pytest.approx(forward, rel=1e-6)
    assert seconds["DDP"] < seconds["DDP + selective"] < seconds["DDP + full"]


# The choice


def large(ranks: int, layers: int = 6, weights: int = 4 << 20, flops: int = 10**8) -> Workload:
    made = [
        block(f"l{at}", weights, 6 << 20, 1 << 20, 2 << 20, 7 << 20, ranks=ranks, flops=flops) for at in range(layers)
    ]
    return workload(*made, ranks=ranks)


def test_a_plan_takes_what_fits():
    """As memory shrinks: first what is fastest, then less and less, in the end a message."""
    taken, work = [], large(4)
    for megabytes in (800, 160, 130, 90, 60, 40, 30):
        try:
            made = make_plan(work, cluster(2, 2, memory_bytes=megabytes * 1e6))
        except UserError as error:
            assert "without any table" in str(error)
            taken.append(None)
            continue
        made.plan.verify(work)
        best, rule = (
            dense_strategies.fastest_candidate(made.dense_candidates),
            dense_strategies.smallest_candidate(made.dense_candidates),
        )
        room = 0.9 * megabytes * 1e6
        assert sum(bytes_ for _, bytes_ in budget.memory_budget(made.candidate.problem).memory_parts) < room
        assert best is not None and rule is not None and rule.strategy.sort_key <= best.strategy.sort_key
        assert all(
            one.seconds >= best.seconds / (1 + dense_strategies.TIE_SHARE) for one in made.dense_candidates if one.fits
        )
        assert made.plan.dense == replace(best.strategy.dense, dtype="float32")
        assert set(block_stages.extra_lanes(made.candidate.problem)) <= set(made.plan.lanes)
        again = reprice.reprice_plan(made.candidate.problem, made.plan)
        assert again.seconds == pytest.approx(made.candidate.seconds)
        told = dict(made.plan.why).get("dense", "")
        assert (best.strategy.name in told) == bool(best.strategy.num_techniques)
        taken.append(best.strategy)
    assert taken[-1] is None and taken[0] is not None
    assert any(way and way.dense.shard for way in taken) and any(way and way.recompute_policy for way in taken)


def test_a_small_dense_part_is_not_asked_about():
    made = make_plan(three(), cluster(2, 2, memory_bytes=1e9))
    assert (
        made.dense_candidates == () and made.plan.dense.replicate == ("level1", "level0") and not made.plan.dense.shard
    )
    assert "dense" not in dict(made.plan.why)


def test_cutting_leaves_room_to_tables():
    work = replace(large(4), tables=(Table("t", 1_200_000, 16),))
    whole = make_plan(work, cluster(2, 2, memory_bytes=2.2e8, slower=1e9))
    problem = whole.candidate.problem
    cut = next(way for way in dense_strategies.all_strategies(work, problem.cluster) if way.name == "FSDP")
    plain = dense_strategies.all_strategies(work, problem.cluster)[0]
    rooms = [budget.memory_budget(dense_strategies.apply_strategy(problem, way)).free_bytes[0] for way in (plain, cut)]
    assert rooms[1] > rooms[0] + 3 * 6 * (4 << 20) / 2


@settings(max_examples=15)
@given(
    layers=st.integers(1, 5),
    weights=st.integers(1 << 12, 1 << 23),
    flops=st.integers(10**5, 10**9),
    faster=st.floats(1.0, 10.0),
    megabytes=st.integers(80, 400),
)
def test_faster_links_and_products_never_make_a_slower_choice(layers, weights, flops, faster, megabytes):
    work, slow = large(4, layers, weights // 4 * 4, flops), cluster(2, 2, memory_bytes=megabytes * 1e6)
    links = tuple(replace(one, bytes_per_second=one.bytes_per_second * faster) for one in slow.levels)
    prices = tuple(scaled(one, 1 / faster) if one.op == "matmul" else one for one in slow.device.prices)
    found = search.define_problem(work, slow, work.batch_size, Precision())
    try:
        placed = dense_strategies.place_tables_first(found, {}).placed
    except UserError:
        return
    best = dense_strategies.fastest_candidate(dense_strategies.evaluate_strategies(found, placed))
    for where in (replace(slow, levels=links), replace(slow, device=replace(slow.device, prices=prices))):
        other = dense_strategies.fastest_candidate(
            dense_strategies.evaluate_strategies(replace(found, cluster=where), placed)
        )
        assert best is not None and other is not None
        assert other.seconds <= best.seconds * (1 + dense_strategies.TIE_SHARE) * (1 + 1e-9)


def test_nothing_waits_for_ever_with_tables_and_blocks_on_all_lanes():
    work = large(8, 3)
    for where in (cluster(8), cluster(2, 4), cluster(2, 2, 2)):
        for way in dense_strategies.all_strategies(work, where):
            problem = dense_strategies.apply_strategy(
                search.define_problem(work, where, work.batch_size, Precision()), way
            )
            placed = dense_strategies.place_tables_first(replace(problem, expand_blocks=False), {}).placed
            assert isinstance(placed, PlacedTables)
            loads = tasks.rank_loads(problem, placed, [1.0])
            calls = simulate.expand_calls(tasks.required_stages(problem, loads, "gradients"), 5)
            simulate.simulate_calls(calls, tasks.stage_tasks(problem, placed, loads), 8, blocking=False).verify()


def test_no_more_blocks_are_recomputed_than_make_room():
    """One less does not fit; the paper's rule knows nothing of it."""
    work, taken = large(4), []
    for megabytes in range(90, 200, 5):
        where = cluster(2, 2, memory_bytes=megabytes * 1e6)
        posed_ = search.define_problem(work, where, work.batch_size, Precision())
        try:
            placed = dense_strategies.place_tables_first(posed_, {}).placed
        except UserError:
            continue
        found = dense_strategies.evaluate_strategies(posed_, placed)
        rule = dense_strategies.smallest_candidate(found)
        assert rule is not None and not rule.strategy.num_recomputed
        for one in (one for one in found if one.strategy.num_recomputed):
            fewer = replace(
                one.strategy, dense=replace(one.strategy.dense, recompute=one.strategy.dense.recompute[:-1])
            )
            assert one.fits and not dense_strategies.evaluate_strategy(posed_, placed, fewer, "read").fits
            whole = next(
                all_
                for all_ in found
                if (all_.strategy.sort_key, all_.strategy.num_recomputed) == (one.strategy.sort_key, 0)
            )
            assert one.peak_bytes >= whole.peak_bytes and one.seconds <= whole.seconds * (1 + 1e-9)
            taken.append(one.strategy.name)
    assert any("1 of 6" in name for name in taken) and len(set(taken)) > 3


def test_models_without_weights_to_cut_have_ddp_alone():
    for given_ in ((), (block("a", 0, 100, 10, 20, 100, ranks=4),)):
        names = [way.name for way in dense_strategies.all_strategies(workload(*given_), cluster(2, 2, slower=1e9))]
        assert {name.split(" ")[0] for name in names} == {"DDP"} and not any("offload" in name for name in names)


def test_blocks_that_need_no_vectors_may_be_cut():
    alone = replace(three(), blocks=tuple(replace(one, needs_vectors=False) for one in three().blocks))
    problem = posed(alone, cluster(2, 2), "FSDP")
    placed = dense_strategies.place_tables_first(replace(problem, expand_blocks=False), {}).placed
    tasks.predict_timeline(problem, placed, tasks.rank_loads(problem, placed, [1.0]), "read").verify()


def test_a_way_that_is_asked_for_is_taken():
    """Of a dense part that is held by DDP unasked; words in any order."""
    work, where = three(), cluster(2, 2)
    assert make_plan(work, where).plan.dense.shard == ()
    made = make_plan(work, where, dense_strategy="full + fsdp")
    assert made.plan.dense.shard == tuple(axis for axis, _ in made.plan.axes) and not made.plan.dense.replicate
    assert [one.block for one in made.plan.dense.recompute] == ["a", "b", "c"]
    assert [one.strategy.name for one in made.dense_candidates] == ["FSDP + full"]
    assert dict(made.plan.why)["dense"].startswith("as asked, FSDP + full: ")


def test_a_way_that_is_asked_for_and_unknown_is_refused():
    with pytest.raises(UserError, match=r'no parallelism strategy "HSPD"; did you mean "HSDP"\?'):
        make_plan(three(), cluster(2, 2), dense_strategy="HSPD")


def test_hsdp_that_is_asked_for_is_that_of_the_innermost_level_or_fsdp():
    several = make_plan(three(8), cluster(2, 2, 2), dense_strategy="HSDP + full").plan.dense
    assert several.shard == ("level0",) and several.replicate == ("level2", "level1")
    assert make_plan(three(2), cluster(2), dense_strategy="hsdp").plan.dense.shard == ("level0",)


def test_a_way_that_is_asked_for_and_does_not_fit_is_refused():
    with pytest.raises(UserError, match="FSDP \\+ offload, as requested, does not fit"):
        make_plan(three(), cluster(2, 2, slower=1000.0), dense_strategy="FSDP + offload")
    assert dict(make_plan(three(), cluster(2, 2), dense_strategy="DDP").plan.why)["dense"].startswith("as asked, DDP: ")
