"""Expert parallelism: experts split over ranks, rows exchanged in steps, copies. Compared with one process, and to the
bit with plain expert parallelism."""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import test_steps as clicks
import torch
from test_dense_plans import DDP, plan_dense
from test_gpt_ranks import SIZE, TOKENS, VOCABULARY, adam, tokens
from test_moe_ranks import EXPERTS, PLANS, STEPS
from torch import nn

from shardwright.checkpoint.step_directories import checkpoint_path
from shardwright.errors import UserError
from shardwright.experts.exchange import ParallelExperts
from shardwright.experts.hosts import HostExperts
from shardwright.layers.decoder import GPT2, LLAMA
from shardwright.layers.moe import MoEMLP, MoESpec
from shardwright.measure.describe import describe
from shardwright.models.gpt import GPT
from shardwright.planner.pins import LayerRequest
from shardwright.planner.plan import make_plan
from shardwright.runtime.build import build
from shardwright.runtime.expert_layout import check_experts
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_single_process
from shardwright.spec import presets
from shardwright.spec.expert_rows import ExpertRowOrder
from shardwright.spec.lanes import EXPERT_LANES
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.plan import ExpertPlan, Plan

HOST, LOCAL = "data@host", "data@local"
BOTH = (HOST, LOCAL)


def make_model(num_experts: int = 4, form: str = "llama", dtype: torch.dtype = torch.float64, **changes: float) -> GPT:
    """`changes`: of the experts' form."""
    torch.manual_seed(4)
    shape = {"vocabulary": VOCABULARY, "context": TOKENS, "channels": 16, "num_blocks": 4, "num_heads": 2}
    experts = replace(EXPERTS, num_experts=num_experts, **changes)
    return GPT(**shape, form=replace(LLAMA if form == "llama" else GPT2, experts=experts)).to(dtype)


def with_experts(
    plan: Plan,
    axes: tuple[str, ...],
    groups: int = 1,
    copies: str = "none",
    order: str = "balanced",
    exchange: str = "flat",
) -> Plan:
    experts = tuple(
        ExpertPlan(f"blocks.{block}.mlp", axes, groups, copies, order=order, exchange=exchange) for block in range(4)
    )
    return replace(plan, experts=experts, lanes=(*plan.lanes, *EXPERT_LANES))


def draw_copies(order: ExpertRowOrder, _: object) -> np.ndarray:
    """Every row is computed by a drawn rank; the same draw on all ranks."""
    chosen_RE = order.chosen_RE
    draw = np.random.default_rng(int((chosen_RE * np.arange(1, chosen_RE.size + 1).reshape(chosen_RE.shape)).sum()))
    num_ranks = len(chosen_RE)
    return np.stack([draw.multinomial(total, [1 / num_ranks] * num_ranks) for total in chosen_RE.sum(0)], 1)


def start_job(stack: ExitStack, plan: Plan, accumulate: int, model: dict, decide=None) -> Job:
    """A job of the model on this rank; four ranks are on two hosts. `decide`: the choice of copies."""
    if plan.num_ranks == 4 and not plan.pipeline:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
    job = build(make_model(**model), plan, optimizer=adam, accumulate=accumulate)
    stack.callback(job.mesh.close)
    for module in job.model.modules():
        exchange = getattr(module, "exchange", None)
        exchange = exchange.inside if isinstance(exchange, HostExperts) else exchange
        if decide is not None and isinstance(exchange, ParallelExperts):
            exchange.decide = decide
    return job


def train(plan: Plan, accumulate: int, model: dict, decide=None, steps: int = STEPS, bounds: tuple[int, ...] = ()):
    """Logits and penalties of each step and of an evaluation, if this rank has them; and the state of the job."""
    with ExitStack() as stack:
        job = start_job(stack, plan, accumulate, model, decide)
        index, size = plan.position(job.mesh.rank, plan.sample_axes)
        start, stop = bounds[index : index + 2] if bounds else (SIZE * index // size, SIZE * (index + 1) // size)
        outputs = [*job.run(tokens(step, start, stop, sample_weights=True) for step in range(steps))]
        outputs += job.evaluate([tokens(100, start, stop, sample_weights=True)])
        state = {name: tensor.clone() for name, tensor in job.state().tensors.items()}
        return [output.logits for output in outputs if output.has_scores], state


def join(answers) -> list[tuple[torch.Tensor, ...]]:
    """The logits and penalties of all samples, by step."""
    parts = [logits for logits, _ in answers if logits]
    return [tuple(torch.cat([part[step][i] for part in parts]) for i in range(2)) for step in range(len(parts[0]))]


def check_close(answers, expected, tolerance: float) -> None:
    expected_steps, expected_state = expected
    for step, pairs in enumerate(zip(join(answers), expected_steps, strict=True)):
        for mine, other in zip(*pairs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=tolerance, msg=lambda m, n=step: f"step {n}: {m}")
    for name, tensor in expected_state.items():
        if tensor.is_floating_point():
            mine = answers[0][1][name]
            torch.testing.assert_close(mine, tensor, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


CASES = [  # strategy, axes of the experts, groups, copies, accumulate, model
    ("DDP", BOTH, 1, None, 1, {}),
    ("DDP", BOTH, 4, None, 2, {"num_experts": 6}),
    ("DDP", BOTH, 2, draw_copies, 1, {"form": "gpt2"}),
    ("DDP", (LOCAL,), 2, draw_copies, 1, {"num_experts": 3}),
    ("DDP, recomputed", (HOST,), 2, draw_copies, 1, {}),
    ("FSDP", BOTH, 2, None, 1, {}),
    ("FSDP", BOTH, 4, draw_copies, 2, {}),
    ("HSDP", (LOCAL,), 2, None, 1, {}),
    ("HSDP, recomputed, offloaded", (HOST,), 1, draw_copies, 1, {}),
    ("PP 2 x FSDP 2", (LOCAL,), 2, draw_copies, 1, {}),
    ("DDP, recomputed", BOTH, 2, draw_copies, 2, {"random_second": True}),
    ("PP 2 x FSDP 2", (LOCAL,), 1, None, 1, {"random_second": True}),
]


@pytest.mark.parametrize(("strategy", "axes", "groups", "decide", "accumulate", "model"), CASES)
def test_split_experts_train_as_in_one_process(ranks, strategy, axes, groups, decide, accumulate, model):
    plan, num_groups = PLANS[strategy]
    copies = "none" if decide is None else "even"
    parallel = with_experts(plan, axes, groups, copies)
    expected = train(single_plan_of(model), accumulate, {**model, "groups": num_groups})
    answers = ranks.run(plan.num_ranks, train, parallel, accumulate, model, decide)
    check_close(answers, expected, 1e-10)


HOST_CASES = [  # strategy, steps inside a host, choice of copies, micro-batches, model
    ("DDP", 1, None, 1, {}),
    ("DDP", 2, draw_copies, 2, {"num_experts": 6, "form": "gpt2"}),
    ("DDP, recomputed", 2, draw_copies, 1, {}),
    ("HSDP, recomputed, offloaded", 1, None, 1, {}),
]


@pytest.mark.parametrize(("strategy", "groups", "decide", "accumulate", "model"), HOST_CASES)
def test_tokens_exchanged_by_hosts_train_as_in_one_process(ranks, strategy, groups, decide, accumulate, model):
    plan, num_groups = PLANS[strategy]
    copies = "none" if decide is None else "even"
    parallel = with_experts(plan, BOTH, groups, copies, exchange="hosts")
    expected = train(single_plan_of(model), accumulate, {**model, "groups": num_groups})
    check_close(ranks.run(plan.num_ranks, train, parallel, accumulate, model, decide), expected, 1e-10)


def test_hosts_need_a_second_axis():
    with pytest.raises(UserError, match="along data@local only; name another axis, or set exchange to flat"):
        check_experts(make_model(), with_experts(PLANS["DDP"][0], (LOCAL,), exchange="hosts"))


def single_plan_of(model: dict) -> Plan:
    plan = plan_single_process(make_model(**model), describe(make_model(**model), tokens(0)), ())
    return replace(plan, dense=replace(plan.dense, dtype="float64", state="float64"))


@pytest.mark.parametrize(("form", "order"), [("llama", "balanced"), ("gpt2", "ranks")])
def test_groups_and_copies_are_exact_to_the_bit(ranks, form, order):
    """In float32, over 20 steps, logits, weights and optimizer state."""
    model = {"form": form, "dtype": torch.float32, "num_experts": 6}
    base = PLANS["DDP"][0]
    base = replace(
        base, dense=replace(base.dense, dtype="float32", state="float32"), wire=replace(base.wire, dense="float32")
    )
    plain = ranks.run(4, train, with_experts(base, BOTH, order=order), 1, model)
    for groups, copies, decide in ((2, "none", None), (4, "none", None), (1, "even", None), (2, "even", draw_copies)):
        answers = ranks.run(4, train, with_experts(base, BOTH, groups, copies, order), 1, model, decide)
        for mine, other in zip(answers, plain, strict=True):
            assert all(
                torch.equal(*pair) for step in zip(mine[0], other[0], strict=True) for pair in zip(*step, strict=True)
            )
            assert [name for name, tensor in other[1].items() if not torch.equal(tensor, mine[1][name])] == []


def split(axes: tuple[str, ...], strategy: str = "DDP", groups: int = 2, copies: str = "even") -> Plan:
    return with_experts(PLANS[strategy][0], axes, groups, copies)


CHECKPOINT_PLANS = {
    "one process": single_plan_of({}),
    "DDP": PLANS["DDP"][0],
    "over 4": split(BOTH),
    "over 2, FSDP": split((LOCAL,), "FSDP"),
    "over 2, PP 2": split((LOCAL,), "PP 2 x FSDP 2"),
}
UNCOUPLED = {"capacity": 0.0, "balance": 0.0, "z": 0.0}  # these depend on how a batch is split


def train_from(plan: Plan, path: str, start: int, stop: int, save: bool):
    with ExitStack() as stack:
        if plan.num_ranks == 4 and not plan.pipeline:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
        job = build(make_model(**UNCOUPLED), plan, optimizer=adam, clip=0.5)
        stack.callback(job.mesh.close)
        if start:
            assert job.load(checkpoint_path(Path(path), start)) == [] and job.step == start
        index, size = plan.position(job.mesh.rank, plan.sample_axes)
        bounds = SIZE * index // size, SIZE * (index + 1) // size
        outputs = [*job.run(tokens(step, *bounds) for step in range(start, stop))]
        if save:
            job.save(path)
        state = {name: tensor.clone() for name, tensor in job.state().tensors.items()}
        return [output.logits for output in outputs if output.has_scores], state


@pytest.mark.parametrize("saved", ["one process", "over 4", "over 2, FSDP", "over 2, PP 2"])
def test_checkpoints_continue_under_any_split_of_the_experts(ranks, tmp_path, saved):
    """To the bit under the same plan, within 1e-10 elsewhere; gradients are clipped by their global norm."""
    plan = CHECKPOINT_PLANS[saved]
    ranks.run(plan.num_ranks, train_from, plan, str(tmp_path), 0, 5, True)
    expected = None
    for name in (saved, *CHECKPOINT_PLANS):
        other = CHECKPOINT_PLANS[name]
        answers = ranks.run(other.num_ranks, train_from, other, str(tmp_path), 5, 10, False)
        if expected is None:
            expected = (join(answers), answers[0][1])
        check_close(answers, expected, 0.0 if name == saved else 1e-10)


def make_click_model() -> nn.Module:
    """DLRM whose top MLP has mixtures of experts."""
    model = clicks.make_model(RowWiseAdaGrad(0.1))
    model.dense.top = MoEMLP(8 + model.dense.interaction.out_features, [16, 8], nn.Linear(8, 1), MoESpec(5, 2)).double()
    return model


def train_click_model(plan: Plan) -> list[torch.Tensor]:
    with ExitStack() as stack:
        if plan.num_ranks == 4:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
        job = build(make_click_model(), plan, optimizer=adam)
        stack.callback(job.mesh.close)
        rank, size = job.mesh.rank, plan.num_ranks
        num = clicks.SIZE
        batches = (clicks.take(clicks.batch(step), num * rank // size, num * (rank + 1) // size) for step in range(10))
        if plan.experts:
            with pytest.raises(UserError, match="expert parallelism trains in job.run"):
                next(iter(job.loader(batches)))
        return [output.logits for output in job.run(batches)]


def test_experts_of_models_with_tables(ranks):
    plan = plan_dense(make_click_model(), DDP, 4)
    experts = tuple(ExpertPlan(f"dense.top.layers.{layer}", BOTH, 2, "even") for layer in range(2))
    plan = replace(plan, experts=experts, lanes=(*plan.lanes, *EXPERT_LANES))
    expected = train_click_model(clicks.single_plan(make_click_model()))
    answers = ranks.run(4, train_click_model, plan)
    for step, logits in enumerate(expected):
        mine = torch.cat([answer[step] for answer in answers])
        torch.testing.assert_close(mine, logits, rtol=0, atol=1e-10, msg=lambda m, n=step: f"step {n}: {m}")


def planned(layers: LayerRequest, strategy: str, num_ranks: int = 4) -> Plan:
    """The planner's plan of the model, on as many ranks of two hosts."""
    cluster = presets.unmeasured_cluster(2, num_ranks // 2, 1 << 33)
    workload = describe(make_model(), tokens(0))
    return make_plan(workload, cluster, layers=replace(layers, dense=strategy)).plan


def run_planned(plan: Plan) -> tuple:
    """What `train` returns, and names of measured events that the plan does not have."""
    names = set[str]()
    with pytest.MonkeyPatch.context() as patch:
        run = Job.run

        def record(job, batches):
            yield from run(job, batches)
            names.update(event.name for event in job.tracer.timeline().events)

        patch.setattr(Job, "run", record)
        answer = train(plan, 1, {})
    if plan.pipeline is not None:
        return answer, set()
    return answer, names - {stage.name for outer in plan.stages for stage in (outer, *outer.body)}


@pytest.mark.parametrize(
    ("layers", "strategy", "num_groups"),
    [
        (LayerRequest(1, experts=4, expert_groups=4), "", 4),
        (LayerRequest(1, experts=2, expert_copies="even"), "FSDP", 4),
        (LayerRequest(1, experts=4, expert_groups=2, expert_copies="even", expert_exchange="hosts"), "DDP", 4),
        (LayerRequest(1, experts=2, expert_groups=2, expert_copies="shadows"), "HSDP + full", 4),
        (LayerRequest(2, 1, experts=2, expert_copies="fastest"), "", 2),
    ],
)
def test_split_experts_of_the_planner_train_as_in_one_process(ranks, layers, strategy, num_groups):
    plan = planned(layers, strategy)
    assert [part.module for part in plan.experts] == [f"blocks.{number}.mlp" for number in range(4)]
    answers = ranks.run(4, run_planned, plan)
    expected = train(single_plan_of({}), 1, {"groups": num_groups})
    check_close([answer for answer, _ in answers], expected, 1e-10)
    assert [names for _, names in answers] == [set()] * 4
