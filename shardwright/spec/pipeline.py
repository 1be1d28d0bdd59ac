"""Pipeline parallelism as data: the chunks of a model, and the order in which a rank runs its micro-batches.

A model is cut between its blocks into chunks. With p pipeline ranks and v chunks on each, the ranks take the chunks in
turn: chunk k of the model is chunk k // p of pipeline rank k % p (interleaved; v = 1: one chunk a rank). Activations
go to the rank of the next chunk, their gradients back.

A schedule is a list of tokens, made by a generator for each pipeline rank. A micro-batch that does not exist, because
the data ends inside a step, is left out of it: the remaining order is still free of deadlocks, since every rank leaves
out the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from shardwright.spec.calls import Schedule
from shardwright.spec.lanes import MAIN, PIPE, PIPE_BACKWARD
from shardwright.spec.plan import Pipeline, Plan, Stage

FORWARD, BACKWARD = "forward", "backward"
FIRST_STAGES = ("read", "to_device", "request", "lengths")  # run for all micro-batches of a step at once


class Token(NamedTuple):
    """One pass of one of a rank's chunks for one micro-batch."""

    pass_: Literal["forward", "backward"]
    chunk: int  # of this rank
    micro: int

    def __str__(self) -> str:
        return f"{self.pass_[0].upper()}{self.chunk}.{self.micro}"


def one_forward_one_backward(num_ranks: int, rank: int, num_chunks: int, micro_batches: int) -> Iterator[Token]:
    """1F1B: each rank fills the pipeline with as many forward passes as ranks follow it, then alternates.

    `num_chunks` must be 1.
    """
    warm_up = min(num_ranks - 1 - rank, micro_batches)
    yield from _alternate(
        [Token(FORWARD, 0, micro) for micro in range(micro_batches)],
        [Token(BACKWARD, 0, micro) for micro in range(micro_batches)],
        warm_up,
    )


def interleaved(num_ranks: int, rank: int, num_chunks: int, micro_batches: int) -> Iterator[Token]:
    """Interleaved 1F1B (Megatron-LM): each rank passes groups of p micro-batches through all its chunks in turn.

    The last group may have fewer micro-batches.
    """
    groups = -(-micro_batches // num_ranks)
    keys = [
        (chunk, group * num_ranks + member)
        for group in range(groups)
        for chunk in range(num_chunks)
        for member in range(num_ranks)
    ]
    warm_up = min(2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks, len(keys))
    tokens = _alternate(
        [Token(FORWARD, *key) for key in keys],
        [Token(BACKWARD, num_chunks - 1 - chunk, micro) for chunk, micro in keys],
        warm_up,
    )
    yield from (token for token in tokens if token.micro < micro_batches)


def _alternate(forward: Sequence[Token], backward: Sequence[Token], warm_up: int) -> Iterator[Token]:
    """`warm_up` forward passes, then a forward and a backward pass in turn, then the remaining backward passes."""
    yield from forward[:warm_up]
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        yield from (ahead, behind)
    yield from backward[len(forward) - warm_up :]


# By name: (pipeline ranks, this rank, its chunks, micro-batches) -> the tokens of this rank's step.
SCHEDULES: Mapping[str, Callable[[int, int, int, int], Iterator[Token]]] = MappingProxyType(
    {"1f1b": one_forward_one_backward, "interleaved": interleaved}
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of the model on one rank; its stages and slots have a suffix if the rank has several."""

    number: int  # in the model
    index: int  # on its rank
    blocks: tuple[int, int]  # first block, and the one after the last
    is_last: bool  # of the model
    suffix: str

    @property
    def is_first(self) -> bool:
        return self.number == 0


def rank_chunks(pipeline: Pipeline, num_ranks: int, rank: int) -> list[Chunk]:
    """The chunks of pipeline rank `rank`."""
    num, starts = len(pipeline.blocks), [0]
    for size in pipeline.blocks:
        starts.append(starts[-1] + size)
    return [
        Chunk(
            number,
            number // num_ranks,
            (starts[number], starts[number + 1]),
            number == num - 1,
            f".{number // num_ranks}" if num > num_ranks else "",
        )
        for number in range(rank, num, num_ranks)
    ]


def rank_stages(plan: Plan, rank: int) -> tuple[Stage, ...]:
    """The stages of a rank; in a pipeline, `forward` and `backward` become those of its chunks and their messages."""
    if plan.pipeline is None:
        return plan.stages
    chunks = rank_chunks(plan.pipeline, plan.num_pipeline_ranks, plan.pipeline_rank(rank))
    stages: list[Stage] = []
    for stage in plan.stages:
        if stage.name == FORWARD:
            for chunk in chunks:
                stages += _forward_stages(chunk)
        elif stage.name == BACKWARD:
            for chunk in reversed(chunks):
                stages += _backward_stages(chunk)
        elif stage.name == "step":
            stages.append(replace(stage, reads=tuple(f"reduced{chunk.suffix}" for chunk in chunks)))
        elif stage.name == "emit" and not any(chunk.is_last for chunk in chunks):
            stages.append(replace(stage, reads=("batch",)))
        else:
            stages.append(stage)
    return tuple(stages)


def rank_schedule(plan: Plan, rank: int, micro_batches: int, *, overlap: bool = True) -> Schedule:
    """The calls of a rank's step in a pipeline, in order: what comes before forward, the schedule, then the rest.

    Empty without a pipeline. With `overlap`, each message is received during the pass before the one that needs it, and
    the next step's batches are read and announced where the rank waits for the first message of a step anyway.
    """
    if plan.pipeline is None:
        return ()
    num_ranks, index = plan.num_pipeline_ranks, plan.pipeline_rank(rank)
    chunks = rank_chunks(plan.pipeline, num_ranks, index)
    tokens = [*SCHEDULES[plan.pipeline.schedule](num_ranks, index, len(chunks), micro_batches)]
    names = {stage.name for stage in rank_stages(plan, rank)}
    trains = any(name.startswith(BACKWARD) for name in names)
    tokens = [token for token in tokens if trains or token.pass_ == FORWARD]
    last_pass = {token.micro: position for position, token in enumerate(tokens)}
    first = [stage for stage in plan.stages if stage.name in FIRST_STAGES]
    first_calls = [
        (stage.name, micro) for stage in first for micro in range(1 if stage.per == "step" else micro_batches)
    ]
    is_ahead = trains and overlap and all(stage.lead for stage in first)
    first_position = _first_wait(tokens, is_last=index == num_ranks - 1) if is_ahead else -1
    calls = [("weigh", 0)] if is_ahead else [*first_calls, ("weigh", 0)]
    ahead = 1 if overlap else 0
    calls += _token_calls(tokens[:ahead], chunks, names, "receive")
    for position, token in enumerate(tokens):
        calls += _token_calls(tokens[position + ahead : position + ahead + 1], chunks, names, "receive")
        calls += first_calls if position == first_position else []
        calls += _token_calls([token], chunks, names, "")
        calls += _token_calls([token], chunks, names, "send")
        if last_pass[token.micro] == position and not trains:
            calls.append(("emit", token.micro))
    if trains:
        calls += [("step", 0), *(("emit", micro) for micro in range(micro_batches))]
    return calls


def _first_wait(tokens: Sequence[Token], *, is_last: bool) -> int:
    """The pass before which a rank waits longest: the last one for activations, the others for the first gradients."""
    return 0 if is_last else next(position for position, token in enumerate(tokens) if token.pass_ == BACKWARD)


def _token_calls(tokens: Sequence[Token], chunks: Sequence[Chunk], names: set[str], message: str) -> Schedule:
    """The calls of the pass itself, or of its message, if the rank has such a stage."""
    calls: list[tuple[str, int]] = []
    for token in tokens:
        parts = (message, "" if message and token.pass_ == FORWARD else token.pass_)
        name = ".".join(filter(None, parts)) + chunks[token.chunk].suffix
        calls += [(name, token.micro)] if name in names else []
    return calls


def _forward_stages(chunk: Chunk) -> Iterator[Stage]:
    suffix = chunk.suffix
    inputs = ("batch",) if chunk.is_first else (f"input{suffix}",)
    if not chunk.is_first:
        yield Stage(f"receive{suffix}", PIPE, ("batch",), inputs)
    waits = ("step_weight",) if chunk.index == 0 else ()  # until all ranks have announced the step
    if chunk.is_last:
        reads = dict.fromkeys(("batch", *waits, *inputs, "state.dense"))
        yield Stage(f"{FORWARD}{suffix}", MAIN, tuple(reads), ("logits", "loss"))
        return
    yield Stage(f"{FORWARD}{suffix}", MAIN, (*waits, *inputs, "state.dense"), (f"output{suffix}", f"edges{suffix}"))
    yield Stage(f"send{suffix}", PIPE, (f"output{suffix}",))


def _backward_stages(chunk: Chunk) -> Iterator[Stage]:
    suffix = chunk.suffix
    inputs = () if chunk.is_first else (f"input{suffix}",)
    gradients = () if chunk.is_first else (f"input.gradient{suffix}",)
    outputs = ("weight", "step_weight", "loss")
    if not chunk.is_last:
        outputs = (f"edges{suffix}", f"output.gradient{suffix}")
        yield Stage(f"receive.{BACKWARD}{suffix}", PIPE_BACKWARD, ("batch",), outputs[1:])
    yield Stage(f"{BACKWARD}{suffix}", MAIN, (*inputs, *outputs), (*gradients, f"reduced{suffix}"))
    if not chunk.is_first:
        yield Stage(f"send.{BACKWARD}{suffix}", PIPE_BACKWARD, gradients)
