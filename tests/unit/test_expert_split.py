"""The planner's choice of expert parallelism: over which ranks, in how many steps, with which copies."""

from dataclasses import replace

import numpy as np
import pytest
from test_pipeline_choice import GB, TFLOP, cluster_of

from shardwright.errors import UserError
from shardwright.planner import search
from shardwright.planner.expert_assignment import ExpertLayer
from shardwright.planner.expert_split import split_as
from shardwright.planner.experts import without_copies
from shardwright.planner.pins import LayerRequest
from shardwright.planner.plan import make_plan
from shardwright.planner.price.axis_groups import AxisGroups, group_cost
from shardwright.planner.problem import Precision, SplitExperts
from shardwright.planner.reprice import reprice_plan
from shardwright.planner.step.critical_path import seconds_by_resource
from shardwright.planner.step.expert_tasks import call_seconds, expert_costs
from shardwright.spec import presets
from shardwright.spec.plan import ExpertCosts, ExpertPlan
from shardwright.spec.workload import Block, Mixture, Product, Workload

EXPERTS, MB = 8, 10**6
SKEWED = (0.65, *[0.05] * 7)


def model(expert_bytes: int = 100 * MB, row_bytes: int = 4096, shares: tuple[float, ...] = ()) -> Workload:
    """A transformer of four blocks with eight experts each, at a batch of 64."""

    def mixture(number: int) -> Mixture:
        rows = Product(64 * 1024 // EXPERTS, 1024, 4096, EXPERTS, "m")
        experts = Block(f"blocks.{number}.mlp.experts", 2 * MB, EXPERTS * expert_bytes, 1, 1, 0)
        experts = replace(experts, forward_flops=2 * rows.flops, forward_products=(rows, rows))
        module = f"blocks.{number}.mlp"
        return Mixture(module, f"blocks.{number}", EXPERTS, 64 * 1024, row_bytes, row_bytes, experts, shares)

    mixtures = tuple(map(mixture, range(4)))
    known = {"input_bytes": 10**8, "forward_bytes": 1, "backward_bytes": 1}
    flops = [2 * TFLOP, *(2 * TFLOP + m.experts.forward_flops for m in mixtures), 2 * TFLOP]
    bytes_ = [100 * MB, *(100 * MB + m.experts.parameter_bytes for m in mixtures), 100 * MB]
    names = ["embed", *(m.block for m in mixtures), "head"]
    blocks = (Block(n, b // 4, b, f, 2 * f, GB, **known) for n, b, f in zip(names, bytes_, flops, strict=True))
    workload = Workload(
        version=1, batch_size=64, tables=(), features=(), statistics=(), blocks=tuple(blocks), experts=mixtures
    )
    workload.verify()
    return workload


def reason_of(result) -> str:
    return dict(result.plan.why).get("experts", "")


def test_large_experts_are_split_and_small_ones_are_not():
    """Gradients of 12.8 GB take longer than rows; of 128 MB, they do not."""
    large = make_plan(model(), cluster_of(host_rate=10e9), layers=LayerRequest(pipeline=1))
    assert [part.module for part in large.plan.experts] == [f"blocks.{number}.mlp" for number in range(4)]
    assert "x as long as with all experts on every rank" in reason_of(large)
    whole = make_plan(model(), cluster_of(host_rate=10e9), layers=LayerRequest(pipeline=1, experts=1))
    assert not whole.plan.experts and whole.candidate.seconds > large.candidate.seconds
    small = make_plan(model(10 * 1000, row_bytes=1 << 20), cluster_of(), layers=LayerRequest(pipeline=1))
    assert not small.plan.experts and "would not shorten the step" in reason_of(small)
    assert reason_of(make_plan(replace(model(), experts=()), cluster_of())) == ""


def chosen(num: int, shares: tuple[float, ...] = ()) -> Workload:
    """The model, with a token's rows for `num` experts."""
    workload = model(shares=shares)
    return replace(workload, experts=tuple(replace(mixture, num_chosen=num) for mixture in workload.experts))


def test_tokens_with_several_experts_go_by_hosts_over_a_slow_network():
    """With four experts of eight on two hosts a token has two on the other, and goes there once."""
    slow, request = cluster_of(hosts=2, local=4, host_rate=1e8), LayerRequest(1, experts=8)
    result = make_plan(chosen(4), slow, layers=request)
    assert {part.exchange for part in result.plan.experts} == {"hosts"} and "by hosts" in reason_of(result)
    flat = make_plan(chosen(4), slow, layers=replace(request, expert_exchange="flat"))
    assert result.candidate.seconds < 0.75 * flat.candidate.seconds
    assert {part.exchange for part in make_plan(chosen(1), slow, layers=request).plan.experts} == {"flat"}
    problem = search.define_problem(chosen(4), slow, 64, result.candidate.problem.precision)
    assert reprice_plan(problem, result.plan).seconds == pytest.approx(result.candidate.seconds)


def test_seconds_between_hosts_by_hand():
    """Of two of eight experts a token has at least one of the four on a host with probability 1 - 4/8 x 3/7."""
    cluster, request = cluster_of(hosts=2, local=4), LayerRequest(1, experts=8, expert_exchange="hosts")
    problem = make_plan(chosen(2), cluster, layers=request).candidate.problem
    part = problem.experts[0]
    hosts = AxisGroups(cluster, problem.mesh_axes, part.plan.axes[:1])
    tokens = 64 * 1024 / 8 / 2  # of a rank
    bytes_ = round(tokens * (1 - 4 / 8 * 3 / 7) * 4096 * 2)  # an even all-to-all of two ranks keeps half
    assert part.host_seconds == pytest.approx(group_cost(hosts, "all_to_all", bytes_, sustained=True).seconds)
    skewed = make_plan(chosen(2, SKEWED), cluster, layers=request).candidate.problem.experts[0]
    assert skewed.host_seconds > part.host_seconds and skewed.compute_seconds > part.compute_seconds


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            LayerRequest(1, experts=8, expert_exchange="host"),
            'plan.expert_exchange="host" is unknown; did you mean "hosts"',
        ),
        (LayerRequest(1, expert_exchange="flat"), "set plan.experts=2 or more"),
        (LayerRequest(1, experts=4, expert_exchange="hosts"), "4 ranks are split over data@local"),
        (
            LayerRequest(1, experts=8, expert_groups=8, expert_exchange="hosts"),
            "plan.expert_groups=8: the ranks of a host",
        ),
    ],
)
def test_an_exchange_that_cannot_be_is_refused(request_, message):
    with pytest.raises(UserError, match=message):
        make_plan(chosen(2), cluster_of(hosts=2, local=4), layers=request_)


def test_a_pipeline_may_leave_two_axes_for_hosts():
    """Two hosts of four ranks: with a pipeline of two inside a host, four ranks split experts over both axes."""
    request = LayerRequest(2, 8, experts=4, expert_exchange="hosts")
    plan = make_plan(chosen(2), cluster_of(hosts=2, local=4), layers=request).plan
    assert {part.exchange for part in plan.experts} == {"hosts"} and {len(part.axes) for part in plan.experts} == {2}


def test_the_stages_of_an_exchange_by_hosts():
    request = LayerRequest(1, experts=8, expert_groups=2, expert_copies="none", expert_exchange="hosts")
    plan = make_plan(chosen(2), cluster_of(hosts=2, local=4), layers=request).plan
    plan.verify(chosen(2))
    bodies = [stage.name for outer in plan.stages for stage in outer.body if stage.name.endswith(" blocks.2.mlp")]
    hosts, inside = (
        ["hosts blocks.2.mlp"],
        [f"{kind} blocks.2.mlp" for kind in ("send", "send", *("experts", "return") * 2)],
    )
    assert bodies == [*hosts, *inside, *hosts, *hosts, *inside, "weights blocks.2.mlp", *hosts]


def test_experts_that_fit_only_when_split():
    result = make_plan(model(GB), cluster_of(memory=40 * GB), layers=LayerRequest(pipeline=1, dense="DDP"))
    assert result.plan.experts and "do not fit" in reason_of(result)
    parts = dict(result.dense_candidates[0].memory_parts) if result.dense_candidates else {}
    with pytest.raises(UserError, match=r"split the experts \(plan.experts=0\), or take more ranks"):
        make_plan(model(GB), cluster_of(memory=40 * GB), layers=LayerRequest(1, experts=1, dense="DDP"))
    num = result.plan.position(0, result.plan.experts[0].axes)[1]
    assert parts["dense weights"] == 600 * MB + 4 * EXPERTS * GB / num


@pytest.mark.parametrize(("pipeline", "num"), [(1, 8), (2, 4)])
def test_a_plan_with_split_experts_is_valid_and_has_the_same_price_again(pipeline, num):
    request = LayerRequest(pipeline=pipeline, micro_batches=4 * (pipeline > 1), experts=num, expert_groups=4)
    result = make_plan(model(shares=SKEWED), cluster_of(), layers=request)
    plan = result.plan
    plan.verify(model(shares=SKEWED))
    assert {part.groups for part in plan.experts} == {4}
    assert {plan.position(0, part.axes)[1] for part in plan.experts} == {num}
    assert f"as pinned, split over {num} ranks" in reason_of(result)
    problem = search.define_problem(model(shares=SKEWED), cluster_of(), 64, result.candidate.problem.precision)
    assert reprice_plan(problem, plan).seconds == pytest.approx(result.candidate.seconds)


def test_the_stages_of_an_exchange_are_those_of_a_call():
    request = LayerRequest(1, experts=8, expert_groups=4, expert_copies="even")
    plan = make_plan(model(shares=SKEWED), cluster_of(), layers=request).plan
    bodies = [stage for outer in plan.stages for stage in outer.body]
    names = [stage.name for stage in bodies if stage.name.endswith(" blocks.2.mlp")]
    sends, steps = ["send blocks.2.mlp"] * 4, ["experts blocks.2.mlp", "return blocks.2.mlp"] * 4
    copy = "copy blocks.2.mlp"
    assert names == [copy, *sends, *steps, *sends, *steps[:2], copy, *steps[2:], "weights blocks.2.mlp"]
    names = [stage.name for stage in bodies]
    assert names.index(copy) < names.index("forward blocks.2")  # sent before the gate has chosen
    assert names.index("forward blocks.2") < names.index(sends[0]) < names.index("forward blocks.3")


def test_copies_are_prefetched_while_the_rest_of_the_block_is_computed():
    """Not those of a mixture that is a block of its own, or not the only one of its block."""
    request = LayerRequest(1, experts=8, expert_copies="even")
    problem = make_plan(model(shares=SKEWED), cluster_of(), layers=request).candidate.problem
    part = problem.experts[0]
    assert part.is_prefetched and part.late_copy_seconds < part.copy_seconds
    alone = replace(part.mixture, module=part.mixture.block)
    twin = replace(part.mixture, module=f"{part.mixture.module}.other")
    for mixtures in ((alone,), (part.mixture, twin)):
        workload = replace(problem.workload, experts=mixtures)
        plan = replace(part.plan, module=mixtures[0].module)
        other = split_as(replace(problem, workload=workload), plan)
        assert other.late_copy_seconds == other.copy_seconds > 0 and not other.is_prefetched


def test_recorded_skew_is_balanced_by_copies_or_its_cost_is_part_of_the_step():
    request = LayerRequest(1, experts=8)
    even, plain, copied = (
        make_plan(model(shares=shares), cluster_of(), layers=replace(request, expert_copies=copies))
        for shares, copies in (((), "none"), (SKEWED, "none"), (SKEWED, ""))
    )
    assert {part.copies for part in copied.plan.experts} == {"fastest"}
    assert even.candidate.seconds < copied.candidate.seconds < plain.candidate.seconds
    assert all(part.copied_bytes for part in copied.candidate.problem.experts)


def test_the_critical_path_of_several_exchanges_of_one_name_adds_up_to_the_step():
    candidate = make_plan(model(), cluster_of(), layers=LayerRequest(1, experts=8, expert_groups=8)).candidate
    assert sum(seconds_by_resource(candidate).values()) == pytest.approx(candidate.seconds)


def test_a_shared_card_has_a_price_of_its_own():
    """With even routing the complete model takes as long as even all-to-alls."""
    preset = presets.load_cluster("johnny")
    problem = search.define_problem(model(), preset, 64, Precision())
    mixture, groups = problem.workload.experts[0], problem.sample_groups
    costs = expert_costs(problem, mixture, groups)
    assert [link.ranks for link in costs.shared] == [8]
    rows = mixture.rows // 16
    even = without_copies(ExpertLayer(tuple(range(16)), costs), np.full((16, 16), rows // 16))
    price = group_cost(groups, "all_to_all", rows * mixture.row_bytes, sustained=True).seconds
    assert even.exchange_seconds == pytest.approx(4 * price)
    local = expert_costs(problem, mixture, AxisGroups(preset, preset.axes, ("data@local",)))
    assert not local.shared and local.send_row < costs.shared[0].send_row


def test_seconds_of_a_call_by_hand():
    mixture = model().experts[0]
    part = SplitExperts(
        plan=ExpertPlan(mixture.module, ("data@host",), 1, "none", ExpertCosts(1.0, 1.0, 1.0)),
        mixture=mixture,
        own_bytes=0.0,
        copied_bytes=0.0,
        compute_seconds=6.0,
        even_seconds=6.0,
        message_seconds=3.0,
        copy_seconds=0.0,
        latency=0.5,
    )
    assert call_seconds(part) == (3 + 6 + 3, 3 + 6 + max(3, 6))
    stepped = replace(part, plan=replace(part.plan, groups=3), latency=0.0)
    assert call_seconds(stepped) == (1 + 6 + 1, 1 + 6 + 6)
    assert call_seconds(replace(stepped, compute_seconds=3.0)) == (3 + 3, max(6, 1 + 3 + 3))
    assert call_seconds(replace(stepped, copy_seconds=2.0)) == (max(1 + 6 + 1, 5 + 3), 13)
    assert call_seconds(replace(stepped, copy_seconds=9.0, late_copy_seconds=9.0)) == (3 + 9 + 3, 3 + 9 + 3)
    assert call_seconds(replace(stepped, copy_seconds=9.0)) == (1 + 6 + 1, 3 + 9 + 3)  # weights were prefetched


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (LayerRequest(experts=3), "plan.experts=3 is no group of .*; test has groups of 2, 8"),
        (LayerRequest(expert_groups=2), "plan.expert_groups is for experts that are split"),
        (LayerRequest(experts=1, expert_copies="even"), "plan.expert_copies is for experts that are split"),
        (LayerRequest(experts=2, expert_copies="evn"), 'plan.expert_copies="evn" is unknown.*"even"'),
        (LayerRequest(experts=2, expert_groups=4), "plan.expert_groups=4: plan.experts=2 allows 1 to 2"),
        (LayerRequest(pipeline=4, experts=8), "plan.experts=8 is no group of .*; test has groups of 2"),
    ],
)
def test_pins_that_no_plan_can_have(request_, message):
    with pytest.raises(UserError, match=message):
        make_plan(model(), cluster_of(), layers=request_)


def test_split_experts_of_a_model_without_any():
    with pytest.raises(UserError, match="plan.experts=2: this model has no mixture of experts"):
        make_plan(replace(model(), experts=()), cluster_of(), layers=LayerRequest(experts=2))
