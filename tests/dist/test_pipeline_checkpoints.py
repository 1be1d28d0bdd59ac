"""Checkpoints of pipelines: complete over the union of ranks, and loadable under any other parallelism."""

from contextlib import ExitStack, closing
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_gpt_ranks import SIZE, STEPS, TOKENS, tokens
from test_pipeline_ranks import DATA, SHARDED, make_model, pipeline_plan, single_plan

from shardwright.checkpoint.reading import Checkpoint
from shardwright.checkpoint.step_directories import checkpoint_path
from shardwright.errors import UserError
from shardwright.layers.decoder import LLAMA
from shardwright.measure.describe import describe
from shardwright.models.gpt import GPT
from shardwright.planner.plan import make_plan
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.spec import presets
from shardwright.spec.plan import Dense, Pipeline, Plan

HALF = STEPS // 2


def data_plan(dense: Dense, world: int) -> Plan:
    plan = make_plan(describe(make_model(), tokens(0)), presets.unmeasured_cluster(1, world, 1 << 33)).plan
    return replace(plan, dense=replace(dense, dtype="float64", state="float64"), wire=single_plan().wire)


PLANS = {
    "one process": single_plan(),
    "DDP": data_plan(DATA, 2),
    "FSDP": data_plan(SHARDED, 2),
    "PP 2": pipeline_plan(Pipeline((3, 1), 2), 2, 1, DATA, LLAMA),
    "PP 2, interleaved": pipeline_plan(Pipeline((1, 1, 1, 1), 4, "interleaved"), 2, 1, DATA, LLAMA),
    "PP 3": pipeline_plan(Pipeline((1, 2, 1), 3), 3, 1, DATA, LLAMA),
    "PP 2 x DP 2": pipeline_plan(Pipeline((2, 2), 2), 2, 2, DATA, LLAMA),
    "PP 2 x FSDP 2": pipeline_plan(Pipeline((2, 2), 2), 2, 2, SHARDED, LLAMA),
}


def with_two_groups(parameters) -> torch.optim.Optimizer:
    """Weight decay only for matrices; on a rank a group may be empty."""
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() == 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], 0.01)


def train(job: Job, plan: Plan, start: int, stop: int) -> list[torch.Tensor]:
    """The logits of this rank's samples, if it has the end of the model."""
    index, size = plan.position(job.mesh.rank, plan.sample_axes)
    bounds = SIZE * index // size, SIZE * (index + 1) // size
    outputs = [*job.run(tokens(step, *bounds) for step in range(start, stop))]
    return [output.logits for output in outputs if output.has_scores]


def train_and_save(plan: Plan, root: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Save in the middle; logits of the steps after it, and the state after them."""
    with ExitStack() as stack:
        job = build(make_model(), plan, optimizer=with_two_groups)
        stack.callback(job.mesh.close)
        train(job, plan, 0, HALF)
        job.save(root)
        logits = train(job, plan, HALF, STEPS)
        return logits, {name: tensor.clone() for name, tensor in job.state().tensors.items()}


def load_and_train(plan: Plan, path: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    with ExitStack() as stack:
        job = build(make_model(), plan, optimizer=with_two_groups)
        stack.callback(job.mesh.close)
        assert job.load(path) == [] and job.step == HALF
        logits = train(job, plan, HALF, STEPS)
        return logits, {name: tensor.clone() for name, tensor in job.state().tensors.items()}


def run(ranks, function, plan: Plan, path: Path):
    """Logits of the global batch by step, and the states of all ranks."""
    answers = ranks.run(plan.num_ranks, function, plan, path)
    parts = [logits for logits, _ in answers if logits]
    return [torch.cat(step_parts) for step_parts in zip(*parts, strict=True)], [state for _, state in answers]


@pytest.mark.parametrize("saved", PLANS)
def test_a_checkpoint_continues_under_every_parallelism(ranks, tmp_path, saved):
    """To the bit under the same plan, within 1e-10 elsewhere; every rank has the full state in memory."""
    expected, states = run(ranks, train_and_save, PLANS[saved], tmp_path)
    names = [*PLANS, *PLANS]
    after = names.index(saved) + 1
    for name in (saved, *names[after : after + 3]):
        logits, other_states = run(ranks, load_and_train, PLANS[name], checkpoint_path(tmp_path, HALF))
        tolerance = 0 if name == saved else 1e-10
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
        for state in (*states, *other_states):
            assert state.keys() == states[0].keys()
            for key in state.keys() - {"random"}:
                torch.testing.assert_close(state[key], states[0][key], rtol=0, atol=1e-10, msg=f"{name}: {key}")


def test_every_value_is_written_once(ranks, tmp_path):
    plan = PLANS["PP 2 x FSDP 2"]
    run(ranks, train_and_save, plan, tmp_path)
    with closing(Checkpoint(checkpoint_path(tmp_path, HALF))) as checkpoint:
        specs, numbers = checkpoint.tensor_specs, checkpoint.numbers["job"]
        names = {name for name, _ in make_model().named_parameters()}
        assert {name.removeprefix("model.") for name in specs if name.startswith("model.")} == names
        assert {*numbers["optimizer"]["parameters"]} == names
        assert numbers["optimizer"]["group_sizes"] == [
            sum(parameter.dim() > 1 for parameter in make_model().parameters()),
            sum(parameter.dim() == 1 for parameter in make_model().parameters()),
        ]


def error_of(plan: Plan, path: Path, blocks: int, optimizer) -> str:
    """The error of loading into a model of `blocks` blocks."""
    torch.manual_seed(4)
    model = GPT(vocabulary=32, context=TOKENS, channels=16, num_blocks=blocks, num_heads=2, form=LLAMA).double()
    with ExitStack() as stack:
        job = build(model, plan, optimizer=optimizer)
        stack.callback(job.mesh.close)
        with pytest.raises(UserError) as error:
            job.load(path)
        return str(error.value)


def in_another_order(parameters) -> torch.optim.Optimizer:
    optimizer = with_two_groups(parameters)
    first = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[1]["params"].append(first)
    return optimizer


def test_all_ranks_report_what_does_not_fit(ranks, tmp_path):
    """Also a rank that has none of the tensors concerned."""
    run(ranks, train_and_save, PLANS["PP 2"], tmp_path)
    path, plan = checkpoint_path(tmp_path, HALF), PLANS["PP 2"]
    for blocks, message in ((3, '"model.blocks.3'), (5, '"model.blocks.4')):
        other = replace(plan, pipeline=Pipeline((blocks - 1, 1), 2))
        errors = set(ranks.run(2, error_of, other, path, blocks, with_two_groups))
        assert len(errors) == 1 and message in errors.pop()
    (error,) = {*ranks.run(2, error_of, plan, path, 4, in_another_order)}
    assert "is in group 0 of the dense optimizer, in this job in group 1" in error


def memory(field: str) -> int:
    """Bytes of this process from /proc/self/status: VmRSS, resident now; VmHWM, the peak."""
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


def peak_memory_of_saving(plan: Plan, root: Path) -> tuple[int, int]:
    """Bytes of the whole model, and by how many the memory of this rank grew at most while it saved."""
    torch.manual_seed(4)
    shape = {"vocabulary": 64, "context": TOKENS, "channels": 1024, "num_blocks": 4, "num_heads": 4}
    with ExitStack() as stack:
        with torch.device("meta"):
            model = GPT(**shape, form=LLAMA)
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        job = build(model, plan, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
        stack.callback(job.mesh.close)
        CDLL(None).malloc_trim(0)  # freed memory must not hide what saving takes
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        job.save(root)
        return num_bytes, memory("VmHWM") - before


@pytest.mark.parametrize("name", ["FSDP", "PP 2"])
def test_no_rank_gathers_the_model_to_save_it(ranks, tmp_path, name):
    """Each rank takes a copy of its own half, and less than half of the model for all else."""
    plan = PLANS[name]
    dense = replace(plan.dense, dtype="float32", state="float32")
    pipeline = replace(plan.pipeline, blocks=(2, 2)) if plan.pipeline is not None else None
    sizes = ranks.run(2, peak_memory_of_saving, replace(plan, dense=dense, pipeline=pipeline), tmp_path)
    with closing(Checkpoint(checkpoint_path(tmp_path, 0))) as checkpoint:
        assert checkpoint.manifest.bytes_ > sizes[0][0]
    for num_bytes, peak in sizes:
        assert 0.4 * num_bytes < peak < 0.8 * num_bytes
