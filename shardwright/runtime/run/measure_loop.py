"""Measures, before a run over ranks, parts of its step: batches of the run's own source, metrics, and forward and
backward pass of its dense part.

Every rank times its dense part, at the same time, because ranks of a host share its memory and caches; the first rank
the rest. It takes one to three seconds.
"""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.comm.mesh import current_rank, host_topology, select_device, world_size
from shardwright.config import Settings
from shardwright.data.loading.loader import to_batch
from shardwright.data.loading.worker import send_through_pipe
from shardwright.data.sources.source import NumpyBatch, Position, Source, make_order, read_batch
from shardwright.jagged import Batch, Vectors, check_batch
from shardwright.kernels.native import retain_freed_memory
from shardwright.layers.loss import BinaryLoss
from shardwright.measure.describe import sparse_of
from shardwright.planner.step.loop_cost import LoopCost
from shardwright.runtime.bindings import Output
from shardwright.runtime.launch import launcher
from shardwright.runtime.materialize import materialize
from shardwright.runtime.run.machine import choose_threads, rank_cores
from shardwright.runtime.run.metrics import WindowMetrics
from shardwright.spec.plan import Plan
from shardwright.spec.workload import Dtype
from shardwright.step.slots import LazyValue

MAX_CALLS, MAX_SECONDS = 4, 0.2  # of one measurement
MIN_DENSE_CALLS, MAX_DENSE_CALLS, DENSE_SECONDS = 3, 12, 2.0
MAX_SAMPLES = 1 << 17  # of a window; a larger one takes as much longer as sorting it does
CACHE_BYTES = 1 << 25  # more than the caches of a core
SIZE_BYTES = 8  # of each column's length, which ranks exchange first


def measure_this_rank(settings: Settings, source: Source, model: nn.Module, plan: Plan) -> LoopCost:
    """All of it on the first rank; on the others only the dense part, at the same time."""
    retain_freed_memory()  # as the job will
    workers = 0 if settings.data.readers else settings.data.workers
    threads = choose_threads(workers, host_topology()[1], launcher.omp_num_threads()).count
    cores, dense = rank_cores(host_topology()[1]), None
    kept = plan.dense.shard or plan.dense.recompute or plan.dense.offload
    if sparse_of(model) is not None and not kept and select_device().type == "cpu":
        dense = dense_seconds(model, _maker(settings, source, world_size()), plan.dense.dtype, cores, threads)
    if current_rank() > 0:
        return LoopCost()
    loss = getattr(model, "loss", None)
    loop = measure_loader_and_metrics(settings, source, loss, num_ranks=world_size(), cores=cores, threads=threads)
    return replace(loop, bottom_seconds=dense[0], top_seconds=dense[1]) if dense else loop


def measure_loader_and_metrics(
    settings: Settings, source: Source, loss: object, *, num_ranks: int, cores: float, threads: int = 1
) -> LoopCost:
    """Each of the `ranks` has so many `cores`, and computes with so many `threads`."""
    label = loss.label if isinstance(loss, BinaryLoss) else None
    make = _maker(settings, source, num_ranks)
    rows = make()
    batch = to_batch(rows)
    making = measure_seconds(make, cores)
    reading = measure_seconds(lambda: check_batch(batch, allow_zero_weights=True), cores)
    prepare, rate = 0.0, 1.0
    if settings.data.readers or settings.data.workers:
        reading += measure_seconds(lambda: send_through_pipe(rows), cores, threads=2)
    else:
        reading += making
    if settings.data.workers and not settings.data.readers:
        at_once = max(1, min(settings.data.workers, int(cores) - threads))
        prepare = making / at_once
        rate = min(1.0, cores / (threads + at_once)) / min(1.0, cores / threads)
    train = settings.train
    log_batches = min(train.log_every, train.steps or train.log_every) * train.accumulate
    samples = log_batches * train.batch_size
    window = WindowMetrics(label, train.group or None, getattr(source, "unknown_ids", ()))
    metrics = _metrics_seconds(window, batch, samples, cores) / log_batches
    gathered = _gathered_bytes(window, samples, log_batches, num_ranks)
    return LoopCost(reading, prepare, metrics, rate, gathered, log_batches)


def dense_seconds(
    model: Any, make_rows: Callable[[], NumpyBatch], dtype: Dtype, cores: float, threads: int = 1
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Forward and backward pass of the dense part and the loss, on a copy: what runs before the vectors are needed and
    after their gradients are there, then the rest.

    The first pass, which allocates memory, does not count. Each has a batch of its own: libraries prepare products for
    every new shape, and rows of experts have new ones in every batch.
    """
    with torch.random.fork_rng(devices=[]):
        dense, loss = copy.deepcopy((model.dense, model.loss))
        materialize(dense, torch.device("cpu"))
        spent: list[tuple[float, ...]] = []
        end = time.perf_counter() + DENSE_SECONDS
        while len(spent) < MIN_DENSE_CALLS or time.perf_counter() < end and len(spent) < MAX_DENSE_CALLS:
            batch = to_batch(make_rows())
            vectors = model.sparse.blank(batch.features, "cpu")
            for tensor in vectors.tensors():
                torch.nn.init.normal_(tensor).requires_grad_(True)
            spent.append(_passes(dense, loss, batch, vectors, dtype))
            dense.zero_grad()
    rate = min(threads, cores)
    bottom, top, back, bottom_back = (fmean(times) / rate for times in zip(*spent[1:], strict=True))
    return (bottom, bottom_back), (top, back)


def _passes(dense: Any, loss: Any, batch: Batch, vectors: Vectors, dtype: Dtype) -> tuple[float, ...]:
    """Processor seconds until the vectors are first needed, of the rest of the forward pass, of the backward pass until
    the vectors' gradients are there, and of the rest."""
    needed: list[float] = []
    ready: list[float] = []

    def get() -> Vectors:
        needed.append(time.process_time())
        return vectors

    kept = vectors.receive(lambda: ready.append(time.process_time()))
    begin = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        logits = dense(batch, LazyValue(get))
    found = loss(tree_map_only(Tensor, Tensor.float, logits), batch)
    middle = time.process_time()
    found.backward()
    end = time.process_time()
    del kept
    first, told = min(needed, default=begin), min(ready, default=end)
    return first - begin, middle - first, told - middle, end - told


def measure_seconds(run: Callable[[], object], cores: float, threads: int = 1) -> float:
    """What `run` takes on so many cores: its processor time there, or by the clock where it waits for something else.

    Where there is time for several calls, the first, which allocates memory, does not count. Each finds the processor's
    caches full of other data, as between two steps: with warm ones a pipe is twice as fast.
    """
    other = torch.empty(CACHE_BYTES, dtype=torch.uint8)
    spent: list[tuple[float, float]] = []
    end = time.perf_counter() + MAX_SECONDS
    while not spent or len(spent) < MAX_CALLS and time.perf_counter() < end:
        other.fill_(len(spent))
        processor, clock = time.process_time(), time.perf_counter()
        run()
        spent.append((time.process_time() - processor, time.perf_counter() - clock))
    processors, clocks = zip(*(spent[1:] or spent), strict=True)
    return max(fmean(processors) / min(float(threads), cores), min(clocks))


def _maker(settings: Settings, source: Source, ranks: int) -> Callable[[], NumpyBatch]:
    """Makes the largest share of a batch, of the next one with each call; of those that the run will read. Of a source
    that grows only the first is there for certain."""
    train = settings.train
    order = make_order(source, train.batch_size, settings.seed, settings.data.shuffle, (ranks - 1, ranks))
    left = 0 if hasattr(source, "wait") else train.steps * train.accumulate - 1 if train.steps else MAX_CALLS
    position: Position = (0, 0)

    def make() -> NumpyBatch:
        nonlocal position, left
        rows = read_batch(source, order, position)
        position, left = (order.next_position(*position), left - 1) if left > 0 else (position, 0)
        return rows

    return make


def _metrics_seconds(window: WindowMetrics, batch: Batch, samples: int, cores: float) -> float:
    """Of the results of a window of `samples`, of made-up logits. What a step adds to a window takes almost nothing."""
    size = max(1, batch.batch_size)
    num = max(1, min(samples, MAX_SAMPLES) // size)
    for logits in torch.randn(num, size, generator=torch.Generator().manual_seed(0)):
        window.update(Output(0, torch.tensor(0.0), logits[: batch.batch_size], batch))
    grown = samples / (num * size)
    return measure_seconds(window.compute, cores, torch.get_num_threads()) * grown * _bits(samples) / _bits(num * size)


def _bits(num: int) -> float:
    return math.log2(max(2, num))


def _gathered_bytes(window: WindowMetrics, samples: int, log_batches: int, ranks: int) -> tuple[int, ...]:
    """Of what ranks gather for a line: the columns' lengths, then losses by batch and each column by sample."""
    columns = window.columns()
    losses = columns.pop("losses")
    assert losses is not None
    sizes = SIZE_BYTES * (1 + len(columns)) * ranks
    by_sample = (one.element_size() * samples for one in columns.values() if one is not None)
    return sizes, losses.element_size() * 2 * log_batches * ranks, *by_sample
