"""The simulator: order, overlap, what is shared, and worked examples of a pipeline and of an MoE layer."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.planner.step import simulate
from shardwright.planner.step.simulate import Call, Task, expand_calls, simulate_calls, steady_step_seconds
from shardwright.planner.step.stages import recommendation_stages as recommendation
from shardwright.spec.plan import Contract, Stage
from shardwright.spec.stage_checks import sort_by_lead
from shardwright.step.serial import run_serial
from shardwright.step.slots import Binding, EndOfData
from shardwright.step.tracer import Tracer

LOAD = Stage("load", "host", (), ("batch",), 2)
SEND = Stage("send", "wire", ("batch",), ("sent",), 1)
WORK = Stage("work", "main", ("batch", "sent", "state.model"), ("done",))
STEP = Stage("step", "main", ("done",), ("state.model",))


def ends(timeline, name, step=0):
    return [event.end for event in timeline.events if (event.name, event.step) == (name, step)]


def whole(timeline):
    return max(event.end for event in timeline.events)


def test_the_serial_executor_runs_in_the_order_that_is_played():
    class Traced(Exception):
        pass

    def run(slots):
        ran.append(slots)
        if len(ran) > 30:
            raise Traced

    ran, tracer = [], Tracer()
    flat = [Stage(one.name, "main", (), ()) for one in recommendation(prefetch=True)]
    bindings = {one.name: Binding(Contract(), run) for one in flat}
    with pytest.raises(Traced):
        for _ in run_serial(tuple(flat), bindings, tracer):
            pass
    ran = [(event.name, event.step) for event in tracer.timeline().events]
    order = expand_calls(flat, 3)
    played = simulate_calls(order, {one.name: Task(seconds=1.0) for one in flat}, 1, blocking=True)
    expected = [(call.stage.name, call.step) for call in order]
    first = min(step for _, step in ran)
    assert len(ran) >= 30 and [(name, step - first) for name, step in ran] == expected[: len(ran)]
    alone = sorted(played.events, key=lambda event: event.start)
    assert [(event.name, event.step) for event in alone] == expected


def leaves(stages):
    return [part for stage in stages for part in (stage.body or (stage,))]


def test_one_batch_meets_the_stages_furthest_ahead_first():
    found = [one.name for one in sort_by_lead(recommendation(prefetch=True, ids_after="gradients"))]
    first = ["read", "to_device", "request", "lengths", "ids", "prefetch", "lookup"]
    assert found[: len(first)] == first and found[-1] == "emit"
    stages = (Stage("work", "main", ("x",)), Stage("load", "main", (), ("x",), lead=1), Stage("stop", "main"))
    ran = []

    def load(slots):
        slots["x"] = len(ran)
        ran.append(("load", len(ran)))

    def work(slots):
        ran.append(("work", slots["x"]))

    def stop(slots):
        if len(ran) > 5:
            raise EndOfData

    bindings = {run.__name__: Binding(Contract(), run) for run in (load, work, stop)}
    assert list(run_serial(stages, bindings)) == [1, 2]
    assert ran == [("load", 0), ("work", 0), ("load", 2), ("work", 2), ("load", 4), ("work", 4)]


def test_stages_ahead_come_tick_by_tick_in_list_order():
    found = [(call.stage.name, call.step) for call in expand_calls([LOAD, SEND, WORK], 3)]
    assert found == [
        *[("load", 0), ("load", 1), ("send", 0)],
        *[("load", 2), ("send", 1), ("work", 0), ("send", 2), ("work", 1), ("work", 2)],
    ]


@pytest.mark.parametrize("blocking", [True, False])
def test_what_runs_ahead_costs_nothing(blocking):
    tasks = {"load": Task(seconds=2.0), "send": Task(seconds=3.0, is_collective=True), "work": Task(seconds=4.0)}
    ahead = simulate_calls(expand_calls([LOAD, SEND, WORK], 8), tasks, 2, blocking=blocking)
    assert steady_step_seconds(ahead) == pytest.approx(4.0)
    serial = [Stage(one.name, one.lane, one.reads, one.writes) for one in (LOAD, SEND, WORK)]
    one_by_one = simulate_calls(expand_calls(serial, 8), tasks, 2, blocking=blocking)
    assert steady_step_seconds(one_by_one) == pytest.approx(9.0) if blocking else steady_step_seconds(one_by_one) < 4.5


def test_a_thread_that_waits_issues_nothing_meanwhile():
    """On a CPU the second exchange needs the first, and what comes after in the list waits with it."""
    first = Stage("first", "wire", (), ("a",))
    second = Stage("second", "other", ("a",), ("b",))
    free = Stage("free", "main", (), ("c",))
    order = expand_calls([first, second, free], 1)
    tasks = {
        "first": Task(seconds=2.0, is_collective=True),
        "second": Task(seconds=1.0, is_collective=True),
        "free": Task(seconds=1.0),
    }
    assert ends(simulate_calls(order, tasks, 2, blocking=True), "free") == [3.0, 3.0]
    assert ends(simulate_calls(order, tasks, 2, blocking=False), "free") == [1.0, 1.0]


def test_a_collective_waits_for_the_slowest_rank():
    before, joint = Stage("before", "main", (), ("a",)), Stage("joint", "wire", ("a",), ("b",))
    order = expand_calls([before, joint], 1)
    tasks = {"before": Task(seconds=(1.0, 5.0)), "joint": Task(seconds=2.0, is_collective=True)}
    played = simulate_calls(order, tasks, 2, blocking=True)
    assert ends(played, "joint") == [7.0, 7.0]
    starts = [event.start for event in played.events if event.name == "joint"]
    assert starts == [1.0, 5.0]


def test_lanes_that_use_a_link_have_equal_parts_of_it():
    one, two = Stage("one", "a", (), ("x",)), Stage("two", "b", (), ("y",))
    tasks = {
        "one": Task(seconds=2.0, is_collective=True, levels=("host",)),
        "two": Task(seconds=3.0, is_collective=True, levels=("host",)),
    }
    played = simulate_calls(expand_calls([one, two], 1), tasks, 2, blocking=True)
    assert ends(played, "one") == [4.0, 4.0]  # at half speed until then
    assert ends(played, "two") == [5.0, 5.0]
    apart = {"one": tasks["one"], "two": Task(seconds=3.0, is_collective=True, levels=("local",))}
    assert whole(simulate_calls(expand_calls([one, two], 1), apart, 2, blocking=True)) == 3.0


def test_computation_loses_what_was_measured_beside_a_collective():
    send, work = Stage("send", "wire", (), ("x",)), Stage("work", "main", (), ("y",))
    tasks = {"send": Task(seconds=4.0, is_collective=True, compute_slowdown=0.25), "work": Task(seconds=10.0)}
    assert whole(simulate_calls(expand_calls([send, work], 1), tasks, 2, blocking=True)) == pytest.approx(11.0)
    tasks["work"] = Task(seconds=1.5)
    played = simulate_calls(expand_calls([send, work], 1), tasks, 2, blocking=True)
    assert ends(played, "work")[0] == pytest.approx(2.0) and whole(played) == 4.0


def test_lasting_slots_keep_their_order_on_any_lane():
    """An update on another lane ends before the next batch reads what it wrote."""
    look, write = Stage("look", "main", ("state.t",), ("v",)), Stage("write", "side", ("v",), ("state.t",))
    tasks = {"look": Task(seconds=1.0), "write": Task(seconds=5.0)}
    played = simulate_calls(expand_calls([look, write], 3), tasks, 1, blocking=False)
    assert [ends(played, "look", step)[0] for step in range(3)] == [1.0, 7.0, 13.0]


@pytest.mark.parametrize("micros", [4, 8])
def test_a_pipeline_of_one_forward_one_backward(micros):
    """Its bubble is (stages - 1) forwards and backwards, as the formula says; transfers between neighbours are free."""
    num, forward, backward = 4, 1.0, 2.0
    order = schedule(num, micros)
    tasks = {f"f{rank}": Task(seconds=forward, ranks=(rank,)) for rank in range(num)}
    tasks |= {f"b{rank}": Task(seconds=backward, ranks=(rank,)) for rank in range(num)}
    for rank in range(num - 1):
        tasks[f"up{rank}"] = Task(ranks=(rank, rank + 1), is_collective=True)
        tasks[f"down{rank}"] = Task(ranks=(rank, rank + 1), is_collective=True)
    played = simulate_calls(order, tasks, num, blocking=False)
    assert whole(played) == pytest.approx((micros + num - 1) * (forward + backward))
    played.verify()


def schedule(num, micros):
    """Every rank's own 1F1B order, merged in any way that keeps each: here by how far a rank is."""
    own = []
    for rank in range(num):
        warm = min(num - rank, micros)
        forwards = [("f", micro) for micro in range(micros)]
        backwards = [("b", micro) for micro in range(micros)]
        steady = chain.from_iterable(zip(backwards, forwards[warm:], strict=False))
        own.append([*forwards[:warm], *steady, *backwards[micros - warm :]])
    stages = {}
    for rank in range(num):
        reads = (f"x{rank}",) if rank else ()
        stages["f", rank] = Stage(f"f{rank}", "main", reads, (f"y{rank}",))
        back = (f"dy{rank}", f"y{rank}") if rank < num - 1 else (f"y{rank}",)
        stages["b", rank] = Stage(f"b{rank}", "main", back, (f"dx{rank}",))
    position = [0] * num
    found, issued = [], set()
    while any(at < len(list_) for at, list_ in zip(position, own, strict=True)):
        for rank in range(num):
            if position[rank] == len(own[rank]):
                continue
            kind, micro = own[rank][position[rank]]
            needed = (kind, rank - 1, micro) if kind == "f" else (kind, rank + 1, micro)
            if 0 <= needed[1] < num and needed not in issued:
                continue
            position[rank] += 1
            issued.add((kind, rank, micro))
            found.append(Call(stages[kind, rank], 0, micro))
            if kind == "f" and rank < num - 1:
                found.append(Call(Stage(f"up{rank}", f"up{rank}", (f"y{rank}",), (f"x{rank + 1}",)), 0, micro))
            if kind == "b" and rank:
                found.append(
                    Call(Stage(f"down{rank - 1}", f"down{rank - 1}", (f"dx{rank}",), (f"dy{rank - 1}",)), 0, micro)
                )
    return found


def test_an_moe_layer_in_parts_hides_its_exchanges():
    """FasterMoE's schedule: of n parts, all exchanges but the first and last run beside experts."""

    def layer(parts):
        found = []
        for part in range(parts):
            found.append(Stage(f"out{part}", "wire", (), (f"x{part}",)))
        for part in range(parts):
            found.append(Stage(f"expert{part}", "main", (f"x{part}",), (f"y{part}",)))
            found.append(Stage(f"back{part}", "wire", (f"y{part}",), (f"z{part}",)))
        tasks = {one.name: Task(seconds=2.0 / parts, is_collective=True) for one in found if one.lane == "wire"}
        tasks |= {one.name: Task(seconds=(6.0 / parts, 5.0 / parts)) for one in found if one.lane == "main"}
        return whole(simulate_calls(expand_calls(found, 1), tasks, 2, blocking=True))

    assert layer(1) == pytest.approx(10.0)
    assert layer(4) == pytest.approx(0.5 + 6.0 + 0.5)


def test_what_is_inside_a_stage_is_played_in_its_place():
    inner = (Stage("gather", "wire", (), ("w",)), Stage("multiply", "main", ("w",), ("y",)))
    outer = Stage("forward", "main", (), ("y",), body=inner)
    tasks = {"gather": Task(seconds=1.0, is_collective=True), "multiply": Task(seconds=2.0)}
    assert whole(simulate_calls(expand_calls([outer], 1), tasks, 2, blocking=True)) == 3.0


def test_ranks_that_wait_for_each_other_are_named():
    one, two = Stage("one", "a", (), ("x",)), Stage("two", "b", ("z",), ("y",))
    late = Stage("late", "main", ("y",), ("z",))
    order = [Call(late, 0), Call(one, 0), Call(two, 0)]
    tasks = {"one": Task(is_collective=True), "two": Task(is_collective=True), "late": Task()}
    assert whole(simulate_calls(order, tasks, 2, blocking=True)) == 0.0
    crossed = [Call(Stage("c", "a", (), ("q",)), 0)]
    with pytest.raises(UserError, match='rank 0 waits for ever at stage "c" of step 0'):
        simulate_calls(crossed, {"c": Task(is_collective=True, ranks=(0, 5))}, 2, blocking=True)
    with pytest.raises(UserError, match='no price of stage "on"; did you mean "one"'):
        simulate_calls(expand_calls([Stage("on", "main", (), ("x",))], 1), tasks, 1, blocking=True)


@settings(max_examples=60)
@given(
    seconds=st.lists(st.floats(0.0, 10.0), min_size=20, max_size=20),
    factor=st.floats(0.1, 10.0),
    blocking=st.booleans(),
    ranks=st.integers(1, 3),
)
def test_scaling_all_seconds_scales_the_step(seconds, factor, blocking, ranks):
    stages = leaves(recommendation(prefetch=True, host_reduce=True))
    joint = {"lengths", "ids", "meet", "vectors", "gradients", "spread", "reduce", "reduce.bottom"}

    def step(scale):
        tasks = {
            one.name: Task(seconds=scale * length, is_collective=one.name in joint)
            for one, length in zip(stages, seconds, strict=True)
        }
        played = simulate_calls(expand_calls(stages, 6), tasks, ranks, blocking=blocking)
        played.verify()
        return steady_step_seconds(played)

    assert step(factor) == pytest.approx(factor * step(1.0), rel=1e-6, abs=1e-9)


@settings(max_examples=60)
@given(
    seconds=st.lists(st.floats(0.0, 10.0), min_size=20, max_size=20),
    which=st.integers(0, 19),
    more=st.floats(0.0, 5.0),
    blocking=st.booleans(),
)
def test_a_longer_stage_never_makes_a_shorter_step(seconds, which, more, blocking):
    stages = leaves(recommendation(prefetch=True, host_reduce=True))

    def step(longer):
        tasks = {
            one.name: Task(
                seconds=length + (longer if at == which else 0.0), is_collective=one.lane in ("ids", "wire", "dense")
            )
            for at, (one, length) in enumerate(zip(stages, seconds, strict=True))
        }
        return steady_step_seconds(simulate_calls(expand_calls(stages, 8), tasks, 2, blocking=blocking))

    assert simulate.EPSILON_SECONDS + step(more) >= step(0.0) * (1 - 1e-9) - 1e-9
