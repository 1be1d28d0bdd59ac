"""Why a split of a model of layers was chosen, and why another one is slower or does not fit, in sentences."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.planner.layers.layer_names import PART_NAMES, describe_split, sharding_name
from shardwright.planner.layers.layer_search import LayerSplit, SearchResult, Training, fits
from shardwright.planner.layers.memory import StageMemory
from shardwright.planner.layers.step_time import PARTS, Part, step_parts

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits", "gathered")
GIB = 1 << 30
MIN_CHANGE = 0.003  # of a step: smaller differences are not named
NUM_CHANGES = 3
NUM_TRIED = 20  # of the oversized: those whose estimates are too short are passed over


def split_reasons(result: SearchResult, num: int = 5) -> Iterator[str]:
    """A sentence for each of the best: what would be faster but does not fit, or what makes it slower than the best."""
    if not result.splits:
        yield no_split_text(result)
        return
    best = result.splits[0]
    closest = faster_oversized(result, best)
    yield f"1: {describe_split(best)}: the shortest step of {len(result.splits):,} configurations that fit" + (
        f"; {closest}" if closest else ""
    )
    for place, split in enumerate(result.splits[1:num], 2):
        yield f"{place}: {describe_split(split)}: {slowdown_text(result.training, split, best)}"


def slowdown_text(training: Training, split: LayerSplit, best: LayerSplit) -> str:
    """How much slower than the best, and what takes longer."""
    slower = split.step.total / best.step.total - 1
    changes = part_changes(training, split, best)
    if not changes:
        return "as fast as the best"
    named = ", ".join(f"{PART_NAMES[part]} {change:+.2f} s" for part, change in changes)
    return f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}: {named}"


def part_changes(training: Training, split: LayerSplit, best: LayerSplit) -> list[tuple[Part, float]]:
    """The parts of the step that differ most, largest change first."""
    own, other = (step_parts(training.timer(each.degrees, each.batch), each.step) for each in (split, best))
    changes: list[tuple[Part, float]] = [(part, own[part] - other[part]) for part in PARTS]
    changes.sort(key=lambda change: -abs(change[1]))
    return [(part, change) for part, change in changes[:NUM_CHANGES] if abs(change) > MIN_CHANGE * best.step.total]


def faster_oversized(result: SearchResult, best: LayerSplit) -> str:
    """The configuration nearest to the best among those that would be faster but do not fit, if any."""
    faster = [split for split in result.oversized if split.step.total < best.step.total]
    faster.sort(key=lambda split: (len(_changed_names(split, best)), split.step.total))
    simulated = (replace(split, step=result.training.step_of(split)) for split in faster[:NUM_TRIED])
    nearest = next((split for split in simulated if split.step.total < best.step.total), None)
    if nearest is None:
        return ""
    named = ", ".join(_changed_names(nearest, best))
    saving = 1 - nearest.step.total / best.step.total
    return f"{named} would save {saving:.1%}, but {overflow_text(result.training, nearest)}"


def _changed_names(split: LayerSplit, best: LayerSplit) -> list[str]:
    """What is different about a split, such as "data 32"."""
    own, other = (
        {
            "tensor": each.degrees.tensor,
            "context": each.degrees.context,
            "pipeline": f"{each.degrees.pipeline} x {each.degrees.num_chunks}",
            "data": each.degrees.data,
            "expert": each.degrees.expert,
            "micro-batch": each.batch.micro_sequences,
            "states": sharding_name(each.degrees),
            "recomputation": each.degrees.recompute,
        }
        for each in (split, best)
    )
    return [f"{name} {value}" for name, value in own.items() if value != other[name]]


def overflow_text(training: Training, split: LayerSplit) -> str:
    """By what a split does not fit: the fullest pipeline rank, and its largest components; or host memory."""
    number, stage = max(enumerate(split.memory), key=lambda numbered: numbered[1].total)
    if stage.total <= training.memory_bytes * (1 + 1e-9):
        return f"offload needs {split.host_bytes / GIB:.1f} of {training.host_bytes / GIB:.1f} GiB of host memory"
    where = f"pipeline rank {number} needs" if len(split.memory) > 1 else "a rank needs"
    return f"{where} {stage.total / GIB:.1f} of {training.memory_bytes / GIB:.1f} GiB ({components_text(stage)})"


def components_text(stage: StageMemory, num: int = 2) -> str:
    """The largest components of a rank's memory."""
    sizes = sorted(((getattr(stage, name), name) for name in COMPONENTS), reverse=True)
    return ", ".join(f"{name} {size / GIB:.1f}" for size, name in sizes[:num])


def no_split_text(result: SearchResult) -> str:
    """Why nothing fits: the configuration that needs least."""
    training = result.training
    if not result.oversized:
        given = ", ".join(f"pins.{name}={value}" for name, value in training.pins.fixed_values.items())
        return (
            f"no way to split {training.model.name} over {training.num_ranks} ranks with {training.sequences} "
            f"sequences of {training.length}{f' and {given}' if given else ''}: degrees must divide ranks, heads, "
            "sequences and layers"
        )
    least = min(result.oversized, key=lambda split: split.fullest.total)
    remedy = "use more ranks" if training.host_bytes else "use more ranks, or allow offload to host memory"
    return (
        f"none of {len(result.oversized):,} configurations fit; that with the least memory: {describe_split(least)}: "
        f"{overflow_text(training, least)}; {remedy}"
    )


def explain_pins(result: SearchResult, pinned: SearchResult) -> Iterator[str]:
    """How the best with the pinned degrees compares with the best of all: why it is slower, or does not fit."""
    given = ", ".join(f"{name} {value}" for name, value in pinned.training.pins.fixed_values.items())
    if not pinned.splits:
        yield f"{given}: {no_split_text(pinned)}"
        if result.splits:
            yield f"without pins the best is {describe_split(result.splits[0])}"
        return
    split, best = pinned.splits[0], result.splits[0]
    place = 1 + sum(each.step.total < split.step.total for each in result.splits)
    yield (
        f"{given}: its best is number {place} of {len(result.splits):,}: {describe_split(split)}: "
        f"{slowdown_text(pinned.training, split, best)}"
    )
    faster = faster_oversized(pinned, split)
    if faster:
        yield f"{given}: {faster}"


def job_text(result: SearchResult, job: LayerSplit) -> str:
    """What a user's own configuration needs, and how far it is from the best."""
    training = result.training
    name = f"your job: {describe_split(job)}"
    if not fits(training, job.memory):
        return f"{name}: does not fit: {overflow_text(training, job)}"
    need = f"needs {job.fullest.total / GIB:.1f} of {training.memory_bytes / GIB:.1f} GiB"
    seconds = f"{job.step.total:.2f} s a step"
    if not result.splits:
        return f"{name}: {need}, {seconds}"
    return f"{name}: {need}, {seconds}, compared with the best: {slowdown_text(training, job, result.splits[0])}"


def without_pins(training: Training) -> Training:
    return replace(training, pins=type(training.pins)())


def assumption_notes(training: Training) -> Sequence[str]:
    """What the predictions assume."""
    hidden = "overlapped with the passes" if training.overheads.hides_gradients else "after the passes"
    notes = [f"all times are predicted; with ZeRO-1, collectives of gradients and weights are {hidden} (key overlap)"]
    if training.model.experts and not training.expert_shares:
        notes.append("experts: equal loads are assumed; set routing=FILE to recorded routing")
    return notes
