"""The simulator: order, overlap, shared links, and worked examples of a pipeline and of an MoE layer."""

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.planner.price.axis_groups import Link
from shardwright.planner.step import simulate
from shardwright.planner.step.rank_calls import RankCalls, Task, expand_calls
from shardwright.planner.step.simulate import simulate_calls, simulate_ranks, steady_step_seconds
from shardwright.planner.step.stages import step_stages
from shardwright.spec.calls import Call
from shardwright.spec.plan import Stage
from shardwright.spec.stage_checks import sort_by_lead
from shardwright.step.executor import run_calls
from shardwright.step.slots import Binding, EndOfData
from shardwright.step.tracer import Tracer

LOAD = Stage("load", "host", (), ("batch",), 2)
SEND = Stage("send", "wire", ("batch",), ("sent",), 1)
WORK = Stage("work", "main", ("batch", "sent", "state.model"), ("done",))
STEP = Stage("step", "main", ("done",), ("state.model",))


def end_times(timeline, name, step=0):
    return [event.end for event in timeline.events if (event.name, event.step) == (name, step)]


def duration(timeline):
    return max(event.end for event in timeline.events)


def test_the_serial_executor_runs_in_the_simulated_order():
    class Stop(Exception):
        pass

    def run(slots):
        runs.append(slots)
        if len(runs) > 30:
            raise Stop

    runs, tracer = [], Tracer()
    stages = [Stage(stage.name, "main", (), ()) for stage in step_stages(prefetch=True)]
    bindings = {stage.name: Binding(run) for stage in stages}
    with pytest.raises(Stop):
        for _ in run_calls(tuple(stages), bindings, tracer, overlap=False):
            pass
    traced = [(event.name, event.step) for event in tracer.timeline().events]
    calls = expand_calls(stages, 3)
    timeline = simulate_calls(calls, {stage.name: Task(seconds=1.0) for stage in stages}, 1, blocking=True)
    expected = [(call.stage.name, call.step) for call in calls]
    first_step = min(step for _, step in traced)
    assert len(traced) >= 30 and [(name, step - first_step) for name, step in traced] == expected[: len(traced)]
    events = sorted(timeline.events, key=lambda event: event.start)
    assert [(event.name, event.step) for event in events] == expected


def leaf_stages(stages):
    return [leaf for stage in stages for leaf in (stage.body or (stage,))]


def test_one_batch_runs_the_stages_with_most_lead_first():
    names = [stage.name for stage in sort_by_lead(step_stages(prefetch=True, ids_after="gradients"))]
    first = ["read", "to_device", "request", "lengths", "ids", "expect", "prefetch", "lookup"]
    assert names[: len(first)] == first and names[-1] == "emit"
    stages = (Stage("work", "main", ("x",)), Stage("load", "main", (), ("x",), lead=1), Stage("stop", "main"))
    log = []

    def load(slots):
        slots["x"] = len(log)
        log.append(("load", len(log)))

    def work(slots):
        log.append(("work", slots["x"]))

    def stop(slots):
        if len(log) > 5:
            raise EndOfData

    bindings = {run.__name__: Binding(run) for run in (load, work, stop)}
    assert list(run_calls(stages, bindings, overlap=False)) == [1, 2]
    assert log == [("load", 0), ("work", 0), ("load", 2), ("work", 2), ("load", 4), ("work", 4)]


def test_stages_with_lead_are_issued_tick_by_tick_in_list_order():
    calls = [(call.stage.name, call.step) for call in expand_calls([LOAD, SEND, WORK], 3)]
    assert calls == [
        *[("load", 0), ("load", 1), ("send", 0)],
        *[("load", 2), ("send", 1), ("work", 0), ("send", 2), ("work", 1), ("work", 2)],
    ]


@pytest.mark.parametrize("blocking", [True, False])
def test_stages_with_lead_are_hidden(blocking):
    tasks = {"load": Task(seconds=2.0), "send": Task(seconds=3.0, is_collective=True), "work": Task(seconds=4.0)}
    overlapped = simulate_calls(expand_calls([LOAD, SEND, WORK], 8), tasks, 2, blocking=blocking)
    assert steady_step_seconds(overlapped) == pytest.approx(4.0)
    serial = [Stage(stage.name, stage.lane, stage.reads, stage.writes) for stage in (LOAD, SEND, WORK)]
    one_by_one = simulate_calls(expand_calls(serial, 8), tasks, 2, blocking=blocking)
    assert steady_step_seconds(one_by_one) == pytest.approx(9.0) if blocking else steady_step_seconds(one_by_one) < 4.5


def test_a_blocked_thread_issues_nothing():
    """On a CPU the second collective waits for the first, and later stages in the list wait with it."""
    first = Stage("first", "wire", (), ("a",))
    second = Stage("second", "other", ("a",), ("b",))
    free = Stage("free", "main", (), ("c",))
    calls = expand_calls([first, second, free], 1)
    tasks = {
        "first": Task(seconds=2.0, is_collective=True),
        "second": Task(seconds=1.0, is_collective=True),
        "free": Task(seconds=1.0),
    }
    assert end_times(simulate_calls(calls, tasks, 2, blocking=True), "free") == [3.0, 3.0]
    assert end_times(simulate_calls(calls, tasks, 2, blocking=False), "free") == [1.0, 1.0]


def test_a_collective_waits_for_the_slowest_rank():
    before, joint = Stage("before", "main", (), ("a",)), Stage("joint", "wire", ("a",), ("b",))
    calls = expand_calls([before, joint], 1)
    tasks = {"before": Task(seconds=(1.0, 5.0)), "joint": Task(seconds=2.0, is_collective=True)}
    timeline = simulate_calls(calls, tasks, 2, blocking=True)
    assert end_times(timeline, "joint") == [7.0, 7.0]
    starts = [event.start for event in timeline.events if event.name == "joint"]
    assert starts == [1.0, 5.0]


def test_lanes_share_a_link_equally():
    first, second = Stage("one", "a", (), ("x",)), Stage("two", "b", (), ("y",))
    tasks = {
        "one": Task(seconds=2.0, is_collective=True, levels=("host",)),
        "two": Task(seconds=3.0, is_collective=True, levels=("host",)),
    }
    timeline = simulate_calls(expand_calls([first, second], 1), tasks, 2, blocking=True)
    assert end_times(timeline, "one") == [4.0, 4.0]  # at half speed until then
    assert end_times(timeline, "two") == [5.0, 5.0]
    separate = {"one": tasks["one"], "two": Task(seconds=3.0, is_collective=True, levels=("local",))}
    assert duration(simulate_calls(expand_calls([first, second], 1), separate, 2, blocking=True)) == 3.0


@pytest.mark.parametrize(
    ("shares", "ends"),
    [
        ((0.5, 0.5), (2.0, 3.0)),  # both fit
        ((0.75, 1.0), (3.0, 4.5)),  # half of the link each: two thirds and a half of their rates
        ((0.25, 1.0), (2.0, 3.5)),  # the first gets what it wants, the second the rest
    ],
)
def test_collectives_that_do_not_fill_a_link_slow_each_other_less(shares, ends):
    stages = Stage("one", "a", (), ("x",)), Stage("two", "b", (), ("y",))
    for links in ((), (Link("host", 0), Link("host", 1))):
        tasks = {
            stage.name: Task(seconds=seconds, is_collective=True, levels=("host",), links=links, link_share=share)
            for stage, seconds, share in zip(stages, (2.0, 3.0), shares, strict=True)
        }
        timeline = simulate_calls(expand_calls(stages, 1), tasks, 2, blocking=True)
        assert [end_times(timeline, stage.name)[0] for stage in stages] == pytest.approx(list(ends))


def test_collectives_slow_overlapped_computation():
    send, work = Stage("send", "wire", (), ("x",)), Stage("work", "main", (), ("y",))
    tasks = {"send": Task(seconds=4.0, is_collective=True, compute_slowdown=0.25), "work": Task(seconds=10.0)}
    assert duration(simulate_calls(expand_calls([send, work], 1), tasks, 2, blocking=True)) == pytest.approx(11.0)
    tasks["work"] = Task(seconds=1.5)
    timeline = simulate_calls(expand_calls([send, work], 1), tasks, 2, blocking=True)
    assert end_times(timeline, "work")[0] == pytest.approx(2.0) and duration(timeline) == 4.0


def test_computation_slows_overlapped_collectives():
    send, work = Stage("send", "wire", (), ("x",)), Stage("work", "main", (), ("y",))
    tasks = {"send": Task(seconds=3.0, is_collective=True, slowdown=0.25), "work": Task(seconds=10.0)}
    timeline = simulate_calls(expand_calls([send, work], 1), tasks, 2, blocking=True)
    assert end_times(timeline, "send")[0] == pytest.approx(4.0) and duration(timeline) == 10.0
    tasks["work"] = Task(seconds=2.0)
    timeline = simulate_calls(expand_calls([send, work], 1), tasks, 2, blocking=True)
    assert end_times(timeline, "send")[0] == pytest.approx(3.5)  # 1.5 of 3 are done after 2


def test_state_slots_keep_their_order_on_any_lane():
    """An update on another lane ends before the next batch reads what it wrote."""
    lookup, update = Stage("look", "main", ("state.t",), ("v",)), Stage("write", "side", ("v",), ("state.t",))
    tasks = {"look": Task(seconds=1.0), "write": Task(seconds=5.0)}
    timeline = simulate_calls(expand_calls([lookup, update], 3), tasks, 1, blocking=False)
    assert [end_times(timeline, "look", step)[0] for step in range(3)] == [1.0, 7.0, 13.0]


@pytest.mark.parametrize("micros", [4, 8])
def test_a_1f1b_pipeline_has_the_known_bubble(micros):
    """The bubble is (stages - 1) forwards and backwards; transfers between neighbours are free."""
    num, forward, backward = 4, 1.0, 2.0
    calls = order_1f1b(num, micros)
    tasks = {f"f{rank}": Task(seconds=forward, ranks=(rank,)) for rank in range(num)}
    tasks |= {f"b{rank}": Task(seconds=backward, ranks=(rank,)) for rank in range(num)}
    for rank in range(num - 1):
        tasks[f"up{rank}"] = Task(ranks=(rank, rank + 1), is_collective=True)
        tasks[f"down{rank}"] = Task(ranks=(rank, rank + 1), is_collective=True)
    timeline = simulate_calls(calls, tasks, num, blocking=False)
    assert duration(timeline) == pytest.approx((micros + num - 1) * (forward + backward))
    timeline.verify()


def order_1f1b(num, micros):
    """Merge the ranks' 1F1B orders: in each round a rank issues its next call if its input was issued."""
    rank_orders = []
    for rank in range(num):
        num_warmup = min(num - rank, micros)
        forwards = [("f", micro) for micro in range(micros)]
        backwards = [("b", micro) for micro in range(micros)]
        steady = chain.from_iterable(zip(backwards, forwards[num_warmup:], strict=False))
        rank_orders.append([*forwards[:num_warmup], *steady, *backwards[micros - num_warmup :]])
    stages = {}
    for rank in range(num):
        reads = (f"x{rank}",) if rank else ()
        stages["f", rank] = Stage(f"f{rank}", "main", reads, (f"y{rank}",))
        reads_b = (f"dy{rank}", f"y{rank}") if rank < num - 1 else (f"y{rank}",)
        stages["b", rank] = Stage(f"b{rank}", "main", reads_b, (f"dx{rank}",))
    position = [0] * num
    calls, issued = [], set()
    while any(index < len(order) for index, order in zip(position, rank_orders, strict=True)):
        for rank in range(num):
            if position[rank] == len(rank_orders[rank]):
                continue
            kind, micro = rank_orders[rank][position[rank]]
            needed = (kind, rank - 1, micro) if kind == "f" else (kind, rank + 1, micro)
            if 0 <= needed[1] < num and needed not in issued:
                continue
            position[rank] += 1
            issued.add((kind, rank, micro))
            calls.append(Call(stages[kind, rank], 0, micro))
            if kind == "f" and rank < num - 1:
                calls.append(Call(Stage(f"up{rank}", f"up{rank}", (f"y{rank}",), (f"x{rank + 1}",)), 0, micro))
            if kind == "b" and rank:
                calls.append(
                    Call(Stage(f"down{rank - 1}", f"down{rank - 1}", (f"dx{rank}",), (f"dy{rank - 1}",)), 0, micro)
                )
    return calls


def message(source, target, seconds, **settings):
    links = (Link("host", source, "out"), Link("host", target, "in"))
    settings = {"links": links, "levels": ("host",), **settings}
    return Task(seconds=seconds, ranks=(source, target), is_collective=True, message="x", **settings)


def ranks_of(*lists):
    """Ranks with these stages and tasks, each for two micro-batches of one step."""
    return [RankCalls(expand_calls([stage for stage, _ in own], 1, 2), {s.name: t for s, t in own}) for own in lists]


WORK_HERE, SEND_ON = Stage("work", "main", (), ("y",)), Stage("send", "pipe", ("y",))
RECEIVE, USE = Stage("receive", "pipe", (), ("x",)), Stage("use", "main", ("x",))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_message_starts_when_both_ranks_have_reached_it(blocking):
    sent = message(0, 1, 2.0)
    sender, receiver = [(WORK_HERE, Task(seconds=3.0)), (SEND_ON, sent)], [(RECEIVE, sent), (USE, Task(seconds=1.0))]
    timeline = simulate_ranks(ranks_of(sender, receiver), blocking=blocking)
    timeline.verify()
    spans = {(event.name, event.micro): (event.start, event.end) for event in timeline.events}
    assert spans["send", 0] == (3.0, 5.0) and spans["receive", 0] == (0.0, 5.0) and spans["use", 0] == (5.0, 6.0)
    assert spans["send", 1] == (6.0, 8.0) and spans["use", 1] == (8.0, 9.0)


def test_the_serial_executor_waits_for_what_it_receives():
    other = Stage("other", "main")
    sent = message(0, 1, 2.0)
    sender = [(WORK_HERE, Task(seconds=3.0)), (SEND_ON, sent)]
    receiver = [(RECEIVE, sent), (other, Task(seconds=1.0)), (USE, Task())]
    starts = [
        next(
            event.start
            for event in simulate_ranks(ranks_of(sender, receiver), blocking=True, serial=serial).events
            if event.name == "other"
        )
        for serial in (False, True)
    ]
    assert starts == [0.0, 5.0]


@pytest.mark.parametrize(("second", "ends"), [((2, 3), 4.0), ((0, 3), 8.0), ((1, 0), 4.0)])
def test_messages_share_the_links_that_both_use(second, ends):
    """Two messages of 4 s: on disjoint uplinks, on the same, in opposite directions of the same."""
    tasks = [message(0, 1, 4.0), message(*second, 4.0)]
    lists = [[] for _ in range(4)]
    for number, task in enumerate(tasks):
        lists[task.ranks[0]].append((Stage(f"send{number}", f"lane{number}", ()), task))
        lists[task.ranks[1]].append((Stage(f"receive{number}", f"lane{number}", (), (f"x{number}",)), task))
    calls = [RankCalls(expand_calls([stage for stage, _ in own], 1), {s.name: t for s, t in own}) for own in lists]
    assert duration(simulate_ranks(calls, blocking=True)) == pytest.approx(ends)


def test_a_message_shares_its_link_with_a_collective_over_all_links():
    sent, all_reduce = message(0, 1, 4.0), Task(seconds=4.0, is_collective=True, levels=("host",))
    reduce = (Stage("reduce", "dense"), all_reduce)
    lists = ranks_of([(SEND_ON, sent), reduce], [(RECEIVE, sent), reduce], [reduce])
    assert duration(simulate_ranks(lists, blocking=True)) == pytest.approx(16.0)  # two of each


def test_a_collective_of_some_ranks_slows_only_their_computation():
    work, send = Stage("work", "main"), Stage("reduce", "dense")
    reduce = Task(seconds=10.0, is_collective=True, ranks=(0, 1), compute_slowdown=0.5)
    own = [
        RankCalls(expand_calls(stages, 1), {"work": Task(seconds=4.0), "reduce": reduce})
        for stages in ([send, work], [work])
    ]
    timeline = simulate_ranks([own[0], own[0], own[1]], blocking=True)
    assert end_times(timeline, "work") == pytest.approx([4.0, 8.0, 8.0])


def test_ranks_that_wait_for_different_messages_wait_forever():
    calls = ranks_of([(SEND_ON, message(0, 1, 1.0))], [(RECEIVE, replace(message(0, 1, 1.0), message="z"))])
    with pytest.raises(UserError, match='rank 0 waits forever at stage "send" of step 0'):
        simulate_ranks(calls, blocking=True)


def test_an_moe_layer_in_parts_overlaps_its_exchanges():
    """FasterMoE's schedule: all exchanges but the first and the last overlap with experts."""

    def layer(parts):
        stages = []
        for part in range(parts):
            stages.append(Stage(f"out{part}", "wire", (), (f"x{part}",)))
        for part in range(parts):
            stages.append(Stage(f"expert{part}", "main", (f"x{part}",), (f"y{part}",)))
            stages.append(Stage(f"back{part}", "wire", (f"y{part}",), (f"z{part}",)))
        tasks = {s.name: Task(seconds=2.0 / parts, is_collective=True) for s in stages if s.lane == "wire"}
        tasks |= {s.name: Task(seconds=(6.0 / parts, 5.0 / parts)) for s in stages if s.lane == "main"}
        return duration(simulate_calls(expand_calls(stages, 1), tasks, 2, blocking=True))

    assert layer(1) == pytest.approx(10.0)
    assert layer(4) == pytest.approx(0.5 + 6.0 + 0.5)


def test_the_body_of_a_stage_is_simulated_in_its_place():
    inner = (Stage("gather", "wire", (), ("w",)), Stage("multiply", "main", ("w",), ("y",)))
    outer = Stage("forward", "main", (), ("y",), body=inner)
    tasks = {"gather": Task(seconds=1.0, is_collective=True), "multiply": Task(seconds=2.0)}
    assert duration(simulate_calls(expand_calls([outer], 1), tasks, 2, blocking=True)) == 3.0


def test_errors_name_ranks_that_wait_forever_and_unpriced_stages():
    first, second = Stage("one", "a", (), ("x",)), Stage("two", "b", ("z",), ("y",))
    late = Stage("late", "main", ("y",), ("z",))
    calls = [Call(late, 0), Call(first, 0), Call(second, 0)]
    tasks = {"one": Task(is_collective=True), "two": Task(is_collective=True), "late": Task()}
    assert duration(simulate_calls(calls, tasks, 2, blocking=True)) == 0.0
    unmatched = [Call(Stage("c", "a", (), ("q",)), 0)]
    with pytest.raises(UserError, match='rank 0 waits forever at stage "c" of step 0'):
        simulate_calls(unmatched, {"c": Task(is_collective=True, ranks=(0, 5))}, 2, blocking=True)
    with pytest.raises(UserError, match='no price of stage "on"; did you mean "one"'):
        simulate_calls(expand_calls([Stage("on", "main", (), ("x",))], 1), tasks, 1, blocking=True)


@settings(max_examples=60)
@given(
    seconds=st.lists(st.floats(0.0, 10.0), min_size=21, max_size=21),
    factor=st.floats(0.1, 10.0),
    blocking=st.booleans(),
    ranks=st.integers(1, 3),
)
def test_scaling_all_seconds_scales_the_step(seconds, factor, blocking, ranks):
    stages = leaf_stages(step_stages(prefetch=True, host_reduce=True))
    collectives = {"lengths", "ids", "meet", "vectors", "gradients", "spread", "reduce", "reduce.bottom"}

    def step(scale):
        tasks = {
            stage.name: Task(seconds=scale * length, is_collective=stage.name in collectives)
            for stage, length in zip(stages, seconds, strict=True)
        }
        timeline = simulate_calls(expand_calls(stages, 6), tasks, ranks, blocking=blocking)
        timeline.verify()
        return steady_step_seconds(timeline)

    assert step(factor) == pytest.approx(factor * step(1.0), rel=1e-6, abs=1e-9)


@settings(max_examples=60)
@given(
    seconds=st.lists(st.floats(0.0, 10.0), min_size=21, max_size=21),
    longer_stage=st.integers(0, 20),
    extra=st.floats(0.0, 5.0),
    blocking=st.booleans(),
)
def test_a_longer_stage_never_makes_a_shorter_step(seconds, longer_stage, extra, blocking):
    stages = leaf_stages(step_stages(prefetch=True, host_reduce=True))

    def step(extra):
        tasks = {
            stage.name: Task(
                seconds=length + (extra if i == longer_stage else 0.0),
                is_collective=stage.lane in ("ids", "wire", "dense"),
            )
            for i, (stage, length) in enumerate(zip(stages, seconds, strict=True))
        }
        return steady_step_seconds(simulate_calls(expand_calls(stages, 8), tasks, 2, blocking=blocking))

    assert simulate.EPSILON_SECONDS + step(extra) >= step(0.0) * (1 - 1e-9) - 1e-9
