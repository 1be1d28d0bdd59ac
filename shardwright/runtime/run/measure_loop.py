"""Measure parts of a step before a run over several ranks, for the planner.

The parts are reading the run's batches, metrics, and the forward and backward pass of the dense model. All ranks time
the dense model at the same time, because the ranks of a host share its memory and caches. The first rank times the
rest. The measurement takes one to three seconds; that of a model of blocks up to ten.
"""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardwright.comm.mesh import current_rank, host_topology, select_device
from shardwright.comm.pending import LazyValue
from shardwright.config import Settings
from shardwright.data.loading.loader import to_batch
from shardwright.data.loading.worker import send_through_pipe
from shardwright.data.sources.source import NumpyBatch, Position, Source, make_order, read_batch
from shardwright.jagged import Batch, Vectors, check_batch
from shardwright.kernels.native import retain_freed_memory
from shardwright.measure.describe import sparse_of
from shardwright.planner.step.loop_cost import LoopCost
from shardwright.runtime.launch import launcher
from shardwright.runtime.materialize import materialize
from shardwright.runtime.outputs import BatchParts, Output, Scores
from shardwright.runtime.run import measure_blocks
from shardwright.runtime.run.machine import choose_threads, rank_cores
from shardwright.runtime.run.metrics import WindowMetrics, labels_of
from shardwright.spec.plan import Plan
from shardwright.spec.workload import Dtype

MAX_CALLS, MAX_SECONDS = 4, 0.2  # limits of one measurement
MIN_DENSE_CALLS, MAX_DENSE_CALLS, DENSE_SECONDS = 3, 12, 2.0
MAX_SAMPLES = 1 << 17  # of a measured window; the time of a larger one is scaled like sorting
CACHE_BYTES = 1 << 25  # more than the caches of a core hold
NUM_BLOCK_BATCHES = 2
SIZE_BYTES = 8  # of a column's length; ranks exchange the lengths first


def measure_this_rank(settings: Settings, source: Source, model: Any, plan: Plan) -> LoopCost:
    """Measure everything on the first rank, only the dense model on the others.

    All ranks call it at the same time. Skips the dense model on a GPU, without tables and blocks, and with tables if it
    is sharded or uses activation checkpointing or offload: it may not fit.
    """
    retain_freed_memory()  # as the job does
    workers = 0 if settings.data.readers else settings.data.workers
    threads = choose_threads(workers, host_topology()[1], launcher.omp_num_threads()).count
    cores, times, num_shards = rank_cores(host_topology()[1]), None, plan.position(0, plan.sample_axes)[1]
    saves_memory = plan.dense.shard or plan.dense.recompute or plan.dense.offload
    if select_device(settings.run.device).type == "cpu":
        make_rows = _batch_maker(settings, source, num_shards)
        if sparse_of(model) is None and measure_blocks.has_parts(model):
            batches = [_last_micro_batch(to_batch(make_rows()), plan) for _ in range(NUM_BLOCK_BATCHES)]
            num_blocks = -(-len(model.blocks) // plan.num_pipeline_ranks)
            passes = measure_blocks.block_seconds(
                model,
                batches,
                num_blocks,
                plan.dense.dtype,
                num_in_flight=plan.num_pipeline_ranks,
                recompute=dict(plan.dense.recompute),
            )
            times = passes, (0.0, 0.0)
        elif sparse_of(model) is not None and not saves_memory:
            times = dense_seconds(model, make_rows, plan.dense.dtype, cores, threads)
    if current_rank() > 0:
        return LoopCost()
    loss = getattr(model, "loss", None)
    loop = measure_loader_and_metrics(settings, source, loss, num_ranks=num_shards, cores=cores, threads=threads)
    return replace(loop, bottom_seconds=times[0], top_seconds=times[1]) if times else loop


def _last_micro_batch(batch: Batch, plan: Plan) -> Batch:
    """The largest micro-batch; with few samples, the first may have none."""
    return [*BatchParts([batch], plan.pipeline.micro_batches if plan.pipeline is not None else 1)][-1]


def measure_loader_and_metrics(
    settings: Settings, source: Source, loss: object, *, num_ranks: int, cores: float, threads: int = 1
) -> LoopCost:
    """Measure batches and metrics, for ranks with `cores` cores and `threads` threads each."""
    make_rows = _batch_maker(settings, source, num_ranks)
    rows = make_rows()
    batch = to_batch(rows)
    make_seconds = measure_seconds(make_rows, cores)
    read_seconds = measure_seconds(lambda: check_batch(batch, allow_zero_weights=True), cores)
    prepare_seconds, rate = 0.0, 1.0
    if settings.data.readers or settings.data.workers:
        read_seconds += measure_seconds(lambda: send_through_pipe(rows), cores, threads=2)
    else:
        read_seconds += make_seconds
    if settings.data.workers and not settings.data.readers:
        num_workers = max(1, min(settings.data.workers, int(cores) - threads))
        prepare_seconds = make_seconds / num_workers
        rate = min(1.0, cores / (threads + num_workers)) / min(1.0, cores / threads)
    train = settings.train
    log_batches = min(train.log_every, train.steps or train.log_every) * train.accumulate
    samples = log_batches * train.batch_size
    window = WindowMetrics(labels_of(loss)[0], train.group or None, getattr(source, "unknown_ids", ()))
    metrics_seconds = _measure_metrics(window, batch, samples, cores) / log_batches
    all_gather_bytes = _gathered_bytes(window, samples, log_batches, num_ranks)
    return LoopCost(read_seconds, prepare_seconds, metrics_seconds, rate, all_gather_bytes, log_batches)


def dense_seconds(
    model: Any, make_rows: Callable[[], NumpyBatch], dtype: Dtype, cores: float, threads: int = 1
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of the dense model and the loss, forward and backward, measured on a copy.

    The first pair is forward before the vectors are needed, and backward after their gradients are ready. The second
    pair is the rest. The first call, which allocates memory, does not count. Each call has its own batch: libraries
    prepare matrix products for every new shape, and the inputs of experts have new shapes in every batch.
    """
    with torch.random.fork_rng(devices=[]):
        dense, loss = copy.deepcopy((model.dense, model.loss))
        materialize(dense, torch.device("cpu"))
        calls: list[tuple[float, ...]] = []
        end = time.perf_counter() + DENSE_SECONDS
        while len(calls) < MIN_DENSE_CALLS or time.perf_counter() < end and len(calls) < MAX_DENSE_CALLS:
            batch = to_batch(make_rows())
            vectors = model.sparse.blank(batch.features, "cpu")
            for tensor in vectors.tensors():
                torch.nn.init.normal_(tensor).requires_grad_(True)
            calls.append(_time_passes(dense, loss, batch, vectors, model.sparse.outputs, dtype))
            dense.zero_grad()
    rate = min(threads, cores)
    bottom, top, top_backward, bottom_backward = (fmean(times) / rate for times in zip(*calls[1:], strict=True))
    return (bottom, bottom_backward), (top, top_backward)


def _time_passes(
    dense: Any, loss: Any, batch: Batch, vectors: Vectors, outputs: Callable[[LazyValue], Any], dtype: Dtype
) -> tuple[float, ...]:
    """Processor seconds of the four parts of a forward and backward pass; `outputs`: of the tables.

    These are: forward until the vectors are first needed, rest of forward, backward until the vectors' gradients are
    ready, rest of backward.
    """
    get_times: list[float] = []
    ready_times: list[float] = []

    def get() -> Vectors:
        get_times.append(time.process_time())
        return vectors

    nodes = vectors.receive(lambda: ready_times.append(time.process_time()))
    start = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        logits = dense(batch, outputs(LazyValue(get)))
    loss_value = loss(tree_map_only(Tensor, Tensor.float, logits), batch)
    middle = time.process_time()
    loss_value.backward()
    end = time.process_time()
    del nodes
    needed, ready = min(get_times, default=start), min(ready_times, default=end)
    return needed - start, middle - needed, ready - middle, end - ready


def measure_seconds(run: Callable[[], object], cores: float, threads: int = 1) -> float:
    """Seconds of a call of `run` on `cores` cores: its processor time over cores, or wall time if longer.

    If there is time for several calls, the first, which allocates memory, does not count. Each call starts with other
    data in the processor's caches, as between two steps: with warm caches a pipe is twice as fast.
    """
    cache_filler = torch.empty(CACHE_BYTES, dtype=torch.uint8)
    calls: list[tuple[float, float]] = []
    end = time.perf_counter() + MAX_SECONDS
    while not calls or len(calls) < MAX_CALLS and time.perf_counter() < end:
        cache_filler.fill_(len(calls))
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        run()
        calls.append((time.process_time() - cpu_start, time.perf_counter() - wall_start))
    cpu_seconds, wall_seconds = zip(*(calls[1:] or calls), strict=True)
    return max(fmean(cpu_seconds) / min(float(threads), cores), min(wall_seconds))


def _batch_maker(settings: Settings, source: Source, num_ranks: int) -> Callable[[], NumpyBatch]:
    """A function that reads the largest local batch of the run's next global batch with each call.

    After the last batch that the run will read, it repeats that batch. With a growing source it always reads the first
    batch, the only one that is certain to exist.
    """
    train = settings.train
    order = make_order(source, train.batch_size, settings.seed, settings.data.shuffle, (num_ranks - 1, num_ranks))
    num_left = 0 if hasattr(source, "wait") else train.steps * train.accumulate - 1 if train.steps else MAX_CALLS
    position: Position = (0, 0)

    def make_rows() -> NumpyBatch:
        nonlocal position, num_left
        rows = read_batch(source, order, position)
        position, num_left = (order.next_position(*position), num_left - 1) if num_left > 0 else (position, 0)
        return rows

    return make_rows


def _measure_metrics(window: WindowMetrics, batch: Batch, samples: int, cores: float) -> float:
    """Seconds to compute the metrics of `samples` samples, with random logits.

    Updating a window in a step takes almost no time.
    """
    size = max(1, batch.batch_size)
    num = max(1, min(samples, MAX_SAMPLES) // size)
    for logits in torch.randn(num, size, generator=torch.Generator().manual_seed(0)):
        window.update(Output(0, batch, Scores(torch.tensor(0.0), logits[: batch.batch_size])))
    scale = samples / (num * size)
    return measure_seconds(window.compute, cores, torch.get_num_threads()) * scale * _log2(samples) / _log2(num * size)


def _log2(num: int) -> float:
    return math.log2(max(2, num))


def _gathered_bytes(window: WindowMetrics, samples: int, log_batches: int, num_ranks: int) -> tuple[int, ...]:
    """Bytes of each all-gather for a log line: column lengths, losses by batch, columns by sample."""
    columns = window.columns()
    losses = columns.pop("losses")
    assert losses is not None
    sizes = SIZE_BYTES * (1 + len(columns)) * num_ranks
    by_sample = (column.element_size() * samples for column in columns.values() if column is not None)
    return sizes, losses.element_size() * 2 * log_batches * num_ranks, *by_sample
