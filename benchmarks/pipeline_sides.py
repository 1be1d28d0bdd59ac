"""Sides of benchmarks/pipeline.py: GPT cut into the same chunks, by Shardwright and by torch.distributed.pipelining."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import cycle
from statistics import mean
from time import perf_counter
from typing import Any

from benchmarks.turns import TurnServer, make_broadcast
from shardwright.report.bubble import Passes, passes_by_step, summarize_passes

VOCABULARY, CHANNELS, NUM_HEADS, NUM_BLOCKS = 256, 512, 8, 16
TOKENS, MICRO_BATCH_SIZE, MICRO_BATCHES = 32, 2, 8
BATCHES, SEED, LEARNING_RATE = 4, 7, 0.05
TIMEOUT_SECONDS = 3600.0  # of a collective: a rank sleeps in one between turns
AGAIN, TORCH = "ours, again", "torch"
NUM_CHUNKS = {"1f1b": 1, "interleaved": 2}  # of a rank, by schedule


def message_bytes() -> int:
    """Bytes of the activations of a micro-batch between two chunks, and of their gradients."""
    return 4 * MICRO_BATCH_SIZE * TOKENS * CHANNELS


def make_model() -> Any:
    import torch

    from shardwright.layers.decoder import LLAMA
    from shardwright.models.gpt import GPT

    torch.manual_seed(SEED)
    return GPT(
        vocabulary=VOCABULARY,
        context=TOKENS,
        channels=CHANNELS,
        num_blocks=NUM_BLOCKS,
        num_heads=NUM_HEADS,
        form=LLAMA,
    )


def make_tokens(number: int) -> tuple[Any, Any]:
    """Ids and labels of a global batch, which all ranks of a pipeline have."""
    import torch

    generator = torch.Generator().manual_seed(SEED + number)
    shape = (MICRO_BATCH_SIZE * MICRO_BATCHES, TOKENS + 1)
    ids = torch.randint(0, VOCABULARY, shape, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make_batch(number: int) -> Any:
    import torch

    from shardwright.jagged import Batch, Jagged

    ids, labels = make_tokens(number)
    return Batch(Jagged(("tokens",), ids.flatten(), torch.full((1, len(ids)), TOKENS)), None, {"next": labels})


def make_optimizer(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, LEARNING_RATE)


@cache
def make_plan(num_ranks: int, schedule: str) -> Any:
    """A plan with chunks of equal size."""
    from shardwright.measure.describe import describe
    from shardwright.planner.step.stages import pipeline_stages
    from shardwright.runtime.planning import plan_single_process
    from shardwright.spec.axes import Axis
    from shardwright.spec.lanes import LANES, PIPELINE_LANES
    from shardwright.spec.plan import Pipeline

    single = plan_single_process(make_model(), describe(make_model(), make_batch(0)), ())
    num_chunks = num_ranks * NUM_CHUNKS[schedule]
    return replace(
        single,
        axes=(Axis("pipe", "host", num_ranks), Axis("data", "local", 1)),
        lanes=(*LANES, *PIPELINE_LANES),
        stages=pipeline_stages(),
        pipeline=Pipeline((NUM_BLOCKS // num_chunks,) * num_chunks, MICRO_BATCHES, schedule),  # pyright: ignore[reportArgumentType]
        dense=replace(single.dense, replicate=("data@local",)),
    )


class OurSide:
    """A job under the plan; yields a loss for each step, NaN where another rank has it."""

    def __init__(self, mesh: Any, schedule: str) -> None:
        from shardwright.runtime.build import build

        self.job = build(make_model(), make_plan(mesh.size, schedule), mesh, optimizer=make_optimizer)
        self.losses = self._losses()

    def _losses(self) -> Iterator[float]:
        for output in self.job.run(cycle([make_batch(number) for number in range(BATCHES)])):
            yield float(output.loss) if output.has_scores else float("nan")

    def passes(self, num_steps: int) -> list[Passes]:
        """The passes of each of the last steps, from the tracer's events."""
        by_step, last = passes_by_step(self.job.tracer.timeline(), self.job.mesh.rank), self.job.step
        return [by_step[step] for step in range(last - num_steps, last)]


class TorchSide:
    """Schedule1F1B or ScheduleInterleaved1F1B over `PipelineStage`, with the same chunks and losses."""

    def __init__(self, mesh: Any, schedule: str) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
        from torch.nn import functional

        from shardwright.spec.pipeline import rank_chunks

        self._intervals: list[list[tuple[float, float]]] = [[]]  # by step
        side = self

        class TimedStage(PipelineStage):
            def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
                return side.record(super().forward_one_chunk, *args, **kwargs)

            def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
                return side.record(super().backward_one_chunk, *args, **kwargs)

        def loss_of(logits: Any, labels: Any) -> Any:
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

        pipeline, model = make_plan(mesh.size, schedule).pipeline, make_model()
        group = dist.new_group(backend="gloo")
        chunks, num_chunks = rank_chunks(pipeline, mesh.size, mesh.rank), len(pipeline.blocks)
        modules = [make_chunk(model, chunk) for chunk in chunks]
        stages = [
            TimedStage(module, chunk.number, num_chunks, torch.device("cpu"), group=group)  # pyright: ignore[reportArgumentType]
            for module, chunk in zip(modules, chunks, strict=True)
        ]
        if schedule == "1f1b":
            self._schedule: Any = Schedule1F1B(stages[0], MICRO_BATCHES, loss_of)
        else:
            self._schedule = ScheduleInterleaved1F1B([*stages], MICRO_BATCHES, loss_of)
        self._has_first, self._has_last = chunks[0].is_first, chunks[-1].is_last
        self._optimizer = make_optimizer([p for module in modules for p in module.parameters()])
        self.losses = self._losses()

    def record(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        result = run(*args, **kwargs)
        self._intervals[-1].append((start, perf_counter()))
        return result

    def _losses(self) -> Iterator[float]:
        import torch

        for ids, labels in cycle([make_tokens(number) for number in range(BATCHES)]):
            self._optimizer.zero_grad()
            losses: list[Any] = []
            inputs = (ids,) if self._has_first else ()
            targets = {"target": labels, "losses": losses} if self._has_last else {}
            self._schedule.step(*inputs, **targets, return_outputs=False)
            self._optimizer.step()
            self._intervals.append([])
            yield float(torch.stack(losses).detach().mean()) if losses else float("nan")

    def passes(self, num_steps: int) -> list[Passes]:
        """The passes of each of the last steps."""
        return [summarize_passes(intervals) for intervals in self._intervals[-1 - num_steps : -1]]


def make_chunk(model: Any, chunk: Any) -> Any:
    """The modules of a chunk as one module, whose input is ids or activations."""
    from torch import nn

    parts = [model.blocks[number] for number in range(*chunk.blocks)]
    return nn.Sequential(
        *([model.embed.token] if chunk.is_first else []), *parts, *([model.head] if chunk.is_last else [])
    )


def make_mesh(plan: Any, *, memory: bool = True) -> Any:
    """A mesh with the groups of the plan's job; `memory`: with shared memory between ranks of a host."""
    from shardwright.comm.mesh import Mesh
    from shardwright.spec.lanes import DENSE, IDS, MAIN, PIPE, PIPE_BACKWARD

    groups = [(MAIN, ()), (IDS, ()), (DENSE, plan.sample_axes)]
    groups += [(lane, plan.pipeline_axes) for lane in (PIPE, PIPE_BACKWARD)]
    return Mesh(plan.mesh_axes, groups=groups, timeout_seconds=TIMEOUT_SECONDS, memory=memory)


def make_sides(mesh: Any, schedule: str) -> dict[str, Any]:
    """The sides of a schedule; where ranks share memory, also one that does not use it."""
    sides: dict[str, Any] = {"ours": OurSide(mesh, schedule), AGAIN: OurSide(mesh, schedule)}
    if mesh.near:
        sides["ours, sockets"] = OurSide(make_mesh(make_plan(mesh.size, schedule), memory=False), schedule)
    return sides | {TORCH: TorchSide(mesh, schedule)}


def worker(folder: str, schedule: str) -> None:
    """Serve turns of the sides of a schedule on every rank."""
    import torch

    from shardwright.comm import collective
    from shardwright.comm.mesh import world_size

    mesh = make_mesh(make_plan(world_size(), schedule))
    group = mesh.group(lane="main")

    def all_gather(*values: float) -> Any:
        row = torch.tensor([values], dtype=torch.float64)
        return collective.all_gather(row, [1] * mesh.size, group).wait()

    sides = make_sides(mesh, schedule)
    server = TurnServer(folder, "ours", mesh.rank, make_broadcast(group))
    server.reply({"sides": [*sides]})
    for name, warm, steps in server.turns():
        side = sides[name]
        losses = [next(side.losses) for _ in range(warm)]
        all_gather(0.0)
        start = perf_counter()
        losses += [next(side.losses) for _ in range(steps)]
        all_gather(0.0)
        seconds = perf_counter() - start
        passes = side.passes(steps)
        rows = all_gather(mean(p.busy for p in passes), mean(p.window for p in passes), *losses)
        reply = {"busy": rows[:, 0].tolist(), "window": float(rows[:, 1].max()), "losses": rows[-1, 2:].tolist()}
        server.reply({"seconds": seconds / steps} | reply)
    mesh.close()
