"""Recorded routing of this engine or of Megatron-LM, read from a file or a folder, sampled evenly while reading.

Megatron-LM's router trace (`--moe-routing-trace-path`) has a file for each rank, and in it a JSON line for each layer
and forward pass, with the experts of every token (`top_indices`). It does not say how many experts there are.

Shape legend: S source ranks, N tokens, K experts per token, E experts.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import UserError, check_regular_file, did_you_mean
from shardwright.spec import routing
from shardwright.spec.expert_rows import IntArray
from shardwright.spec.workload import Mixture, Workload

TraceFormat = Literal["Shardwright", "Megatron-LM"]
Pass = dict[str, IntArray]  # rows_SE of each mixture
MEGATRON_FILES = "router_trace_rank*.jsonl"
MEGATRON_KEYS = ("step", "block", "layer", "rank", "top_indices")
MAX_RECORDS = 500  # sampled passes times mixtures: a choice of copies takes some milliseconds
MIN_PASSES = 16  # sampled, whatever the number of mixtures


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The rows of each expert, by pass, mixture and source rank. A pass is one forward pass of the model.

    `passes`: evenly sampled from `num_passes`. `shares`: of all recorded rows, by mixture and expert.
    """

    path: str
    format: TraceFormat
    num_passes: int
    passes: tuple[Pass, ...]
    shares: dict[str, NDArray[np.float64]]


def is_trace(path: str) -> bool:
    """Whether a path is recorded routing by its name: a .jsonl file, or a folder of Megatron-LM's router trace."""
    return Path(path).suffix == ".jsonl" or any(Path(path).glob(MEGATRON_FILES))


def read_trace(path: str, num_experts: int = 0) -> RoutingTrace:
    """Read a trace; the format is recognized by its content. `num_experts`: 0: as recorded; of Megatron-LM's trace, one
    more than the highest expert."""
    files = sorted(Path(path).glob(MEGATRON_FILES)) if Path(path).is_dir() else [Path(path)]
    sample, formats = _PassSample(), set[TraceFormat]()
    for line, origin in (pair for file in files for pair in _read_lines(file)):
        format_, module, rows_by_source = _parse(line, origin)
        formats.add(format_)
        if len(formats) > 1:
            raise UserError(f"{origin}: a record of {format_}, after records of another format; give them separately")
        if format_ == "Shardwright":
            sample.check_shape(module, rows_by_source, origin)
        for source, rows_E in rows_by_source.items():
            sample.add(module, source, rows_E)
    if not formats:
        raise UserError(f"{path}: no recorded routing in it")
    (format_,) = formats
    highest = max(map(len, sample.totals.values()))
    if num_experts and (highest > num_experts or (format_ == "Shardwright" and highest < num_experts)):
        raise UserError(f"{path}: {highest} experts were recorded; drop experts.num_experts={num_experts}")
    # In Megatron-LM's trace, experts after the last that has rows are unknown; all its mixtures have as many.
    passes = sample.whole_passes(max(highest, num_experts) if format_ == "Megatron-LM" else 0)
    if not passes:
        raise UserError(f"{path}: no pass with rows that all ranks recorded")
    sizes = {module: rows_SE.shape[1] for each in passes for module, rows_SE in each.items()}
    totals = {module: _pad(sample.totals[module], size) for module, size in sizes.items()}
    shares = {module: total_E / total_E.sum() for module, total_E in totals.items()}
    return RoutingTrace(path, format_, sample.num_passes, passes, shares)


def with_recorded_shares(workload: Workload, trace: RoutingTrace) -> Workload:
    """The workload with the recorded share of each expert; mixtures that the trace lacks are as before."""
    names = [mixture.module for mixture in workload.experts]
    for module in trace.shares:
        if module not in names:
            message = did_you_mean(module, names) if names else ", which has no mixture of experts"
            raise UserError(f'{trace.path}: mixture "{module}" is not in the model{message}')
    mixtures: list[Mixture] = []
    for mixture in workload.experts:
        shares_E = trace.shares.get(mixture.module)
        if shares_E is not None and len(shares_E) != mixture.num_experts:
            raise UserError(
                f'{trace.path}: mixture "{mixture.module}" was recorded with {len(shares_E)} experts, and has '
                f"{mixture.num_experts} in the model; record the routing of this model"
            )
        mixtures.append(mixture if shares_E is None else replace(mixture, shares=tuple(shares_E.tolist())))
    return replace(workload, experts=tuple(mixtures))


def _read_lines(file: Path) -> Iterator[tuple[str, str]]:
    """The lines that are not empty, and the name of each in errors."""
    check_regular_file(file)
    try:
        with file.open() as lines:
            yield from ((line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as recorded routing ({error})") from error


def _parse(line: str, origin: str) -> tuple[TraceFormat, str, dict[int, IntArray]]:
    """The format of a line, its mixture, and the rows of each expert by source rank."""
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError:
        value = None
    data: dict[str, Any] = value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    if {"module", "rows"} <= data.keys():
        record = routing.parse_line(line, origin)
        return "Shardwright", record.module, {rank: np.array(rows) for rank, rows in enumerate(record.rows)}
    if data.keys() >= set(MEGATRON_KEYS):
        return "Megatron-LM", *_count_experts(data, origin)
    raise UserError(
        f"{origin}: no record of routing; wanted a JSON object with step, module and rows (Shardwright), or with "
        f"{', '.join(MEGATRON_KEYS)} (Megatron-LM's router trace)"
    )


def _count_experts(data: dict[str, Any], origin: str) -> tuple[str, dict[int, IntArray]]:
    """The mixture, and the rows of each expert, in a record of Megatron-LM. An expert below 0 is a dropped choice."""
    try:
        experts_NK, layer, rank = np.array(data["top_indices"], np.int64), int(data["layer"]), int(data["rank"])
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"{origin}: wanted whole numbers layer and rank, and as many top_indices for every token"
        ) from None
    block = f"{data['block']}.{data['mtp_idx']}" if "mtp_idx" in data else data["block"]
    return f"{block}.layers.{layer}", {rank: np.bincount(experts_NK[experts_NK >= 0])}


class _PassSample:
    """Every so many passes. When there are too many records, every second of the kept passes is dropped."""

    def __init__(self) -> None:
        self.totals: dict[str, IntArray] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._counts = Counter[tuple[str, int]]()  # records of each mixture and source rank
        self._stride = 1
        self._kept: dict[int, dict[str, dict[int, IntArray]]] = {}  # by pass, mixture and source rank

    @property
    def num_passes(self) -> int:
        return max(self._counts.values())

    def check_shape(self, module: str, rows_by_source: dict[int, IntArray], origin: str) -> None:
        shape = len(rows_by_source), len(rows_by_source[0])
        if self._shapes.setdefault(module, shape) != shape:
            raise UserError(
                f'{origin}: mixture "{module}" has {shape[1]} experts on {shape[0]} ranks, and before '
                f"{self._shapes[module][1]} on {self._shapes[module][0]}; give each run's file separately"
            )

    def add(self, module: str, source: int, rows_E: IntArray) -> None:
        number = self._counts[module, source]
        self._counts[module, source] += 1
        longest = max(len(rows_E), len(self.totals.get(module, ())))
        self.totals[module] = _pad(self.totals.get(module, rows_E[:0]), longest) + _pad(rows_E, longest)
        if number % self._stride:
            return
        self._kept.setdefault(number, {}).setdefault(module, {})[source] = rows_E
        if len(self._kept) > max(MIN_PASSES, MAX_RECORDS // len(self.totals)):
            self._stride *= 2
            self._kept = {number: kept for number, kept in self._kept.items() if number % self._stride == 0}

    def whole_passes(self, num_experts: int) -> tuple[Pass, ...]:
        """The sampled passes, of each the mixtures that all their ranks recorded with any rows."""
        sources: dict[str, set[int]] = {}
        for module, source in self._counts:
            sources.setdefault(module, set()).add(source)
        passes: list[Pass] = []
        for number in sorted(self._kept):
            whole: Pass = {}
            for module, kept in self._kept[number].items():
                if kept.keys() == sources[module]:
                    size = num_experts or len(self.totals[module])
                    whole[module] = np.array([_pad(kept[source], size) for source in sorted(kept)])
            passes.append({module: rows_SE for module, rows_SE in whole.items() if rows_SE.any()})
        return tuple(each for each in passes if each)


def _pad(rows_E: IntArray, size: int) -> IntArray:
    return rows_E if len(rows_E) == size else np.pad(rows_E, (0, size - len(rows_E)))
