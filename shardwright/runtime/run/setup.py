"""Set up a run before its first step: threads, mesh, start checkpoint, run directory, loader."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwright.checkpoint.step_directories import list_checkpoints, resolve_checkpoint
from shardwright.comm.mesh import Mesh, host_topology
from shardwright.comm.transport.servers import TableServers
from shardwright.config import Settings
from shardwright.data.graphs.neighborhoods import Neighborhoods
from shardwright.data.graphs.partition import edge_cut
from shardwright.data.loading.loader import Loader
from shardwright.data.readers.client import Readers
from shardwright.data.sources.clicks import ClickLog
from shardwright.data.sources.source import Source
from shardwright.errors import UserError
from shardwright.jagged import ids_per_feature
from shardwright.measure.describe import sparse_of
from shardwright.runtime.changed_rows import ChangedRows
from shardwright.runtime.job import Job
from shardwright.runtime.launch import launcher
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.run import learning_rate, recipe
from shardwright.runtime.run.device import device_notes
from shardwright.runtime.run.directory import RunDirectory
from shardwright.runtime.run.machine import Threads, choose_threads
from shardwright.runtime.run.started_servers import FOLDER, StartedServers
from shardwright.runtime.saving import Saver
from shardwright.runtime.served import close_connections, make_servers
from shardwright.spec.plan import Plan
from shardwright.spec.table_checks import INCREMENT_DTYPES

COLLECTIVE_TIMEOUT_SECONDS = 600.0  # longer than rank 0 needs to write a checkpoint
NUM_COUNTED_BATCHES = 8  # batches in which the ids of tables with rows in load order are counted


def set_threads(settings: Settings, stack: ExitStack) -> Threads:
    """Set torch's threads to this rank's share of the cores; closing the stack restores them."""
    workers = 0 if settings.data.readers else settings.data.workers
    threads = choose_threads(workers, host_topology()[1], launcher.omp_num_threads())
    if not threads.is_set:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads.count)
    return threads


def load_start_checkpoint(settings: Settings, job: Job, rank_group: RankGroup) -> None:
    """Load the state of another run (`run.start`), unless this run already has a checkpoint.

    All ranks call it; the first broadcasts the path.
    """
    checkpoints = Path(settings.run.directory) / (settings.run.name or ".") / "checkpoint"
    if settings.run.start and not (settings.run.name and list_checkpoints(checkpoints)):
        job.start_from(
            rank_group.broadcast_text(str(resolve_checkpoint(Path(settings.run.start))) if rank_group.is_first else "")
        )


def open_directory(settings: Settings, rank_group: RankGroup) -> RunDirectory:
    """Create or resume the run directory on the first rank, the only writer, and broadcast its path."""
    if not rank_group.is_first:
        return RunDirectory(Path(rank_group.broadcast_text("")), is_writer=False)
    if launcher.is_restart("") and not settings.run.name:
        raise UserError(
            "these ranks were restarted, but the run to resume is unknown; start the job with run.name=NAME"
        )
    resumes = settings.run.resume or launcher.is_restart(RunDirectory.saved_launch_id(settings))
    directory = (
        RunDirectory.resume(settings)
        if resumes and RunDirectory.should_resume(settings)
        else RunDirectory.create(settings)
    )
    rank_group.broadcast_text(str(directory.path.resolve()))
    return directory


@contextmanager
def table_servers(settings: Settings, plan: Plan, mesh: Mesh) -> Iterator[RunDirectory | None]:
    """Give the mesh the plan's table servers. All ranks call it.

    Servers that the run starts need its directory, which is opened for them; the first rank starts them, and ends them
    after all ranks have left the context.
    """
    servers, ranks = settings.servers, RankGroup(mesh)
    if not plan.servers or not servers.start:
        mesh.servers = make_servers(servers) if plan.servers else None
        yield None
        return
    with closing(open_directory(settings, ranks)) as directory, ExitStack() as stack:
        stack.callback(directory.remove_if_undescribed)
        addresses, error = "", ""
        if ranks.is_first:
            try:
                started = stack.enter_context(closing(StartedServers(servers.start, directory.path / FOLDER)))
                addresses = " ".join(started.addresses)
            except UserError as failure:
                error = str(failure)
        if error := ranks.broadcast_text(error):
            raise UserError(error)
        mesh.servers = TableServers(tuple(ranks.broadcast_text(addresses).split()), "", servers.timeout)
        stack.callback(close_connections, mesh)
        yield directory
        close_connections(mesh)
        ranks.all_gather_text("")  # no rank uses the servers any more


def make_rank_loader(settings: Settings, source: Source, shard: tuple[int, int]) -> Loader:
    """Create the loader of a rank's training batches, prefetched by worker processes or by readers."""
    data = settings.data
    readers = Readers(data.readers, data.reader_keys) if data.readers else None
    workers = 0 if readers else data.workers
    loader = recipe.make_loader(settings, source, workers=workers, readers=readers, prefetch=data.prefetch, shard=shard)
    if data.deal == "length":
        loader.deal_by_length(data.deal_cost)
    loader.meet()
    return loader


def make_savers(
    settings: Settings, directory: RunDirectory, rank_group: RankGroup, changes: ChangedRows
) -> tuple[Saver, Saver, Saver]:
    """The savers of a run: of checkpoints, of best states, and of publications."""
    train = settings.train
    increment_dtype = next((dtype for key, dtype in INCREMENT_DTYPES.items() if key in settings.allow), "")
    checkpoints = Saver(
        rank_group,
        directory.checkpoints,
        keep=train.keep_checkpoints,
        increments=train.increments,
        increment_dtype=increment_dtype,
        changes=changes,
    )
    publications = Saver(
        rank_group,
        directory.published,
        keep=train.keep_publications,
        increments=sys.maxsize,
        increment_dtype=increment_dtype,
        changes=changes,
        is_publication=True,
    )
    return checkpoints, Saver(rank_group, directory.best, keep=sys.maxsize), publications


def start_notes(settings: Settings, source: Source, job: Job, previous_threads: int) -> Iterator[str]:
    """Notes for the user before the first step."""
    if previous_threads != torch.get_num_threads():
        yield f"this run used {previous_threads} threads before: from here on sums may differ in their last bits"
    if isinstance(source, ClickLog) and source.training_statistics.warning:
        yield f"{settings.data.arguments.get('path', 'data')}: {source.training_statistics.warning}"
    if isinstance(source, Neighborhoods) and source.partitions > 1:
        cut = edge_cut(source.graph.neighbors, source.partition_N)
        yield f"{100 * cut:.1f} % of the edges are between different ones of {source.partitions} partitions"
    yield from device_notes(settings.run.device, job.plan, job.model, job.mesh)
    if job.mesh.servers is not None:
        yield f"table servers: {', '.join(job.mesh.servers.addresses)}"
    if settings.train.base_batch:
        yield learning_rate.describe_scaling(settings.train, job.rates)


def hottest_ids(settings: Settings, source: Source, model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The ids of tables whose rows are in load order, most frequent first, as counted in the first batches."""
    names = {table.table for table in plan.tables if table.order == "load"}
    sparse = sparse_of(model)
    if sparse is None or not names:
        return {}
    counts = {table.name: torch.zeros(table.rows, dtype=torch.int64) for table in sparse.tables if table.name in names}
    num_batches = min(NUM_COUNTED_BATCHES, settings.train.steps * settings.train.accumulate or NUM_COUNTED_BATCHES)
    with closing(recipe.make_loader(settings, source)) as loader:
        for batch in itertools.islice(loader, num_batches):  # a stream may never have more
            lookup = sparse.read(batch.features)
            sparse.check(lookup)
            for feature, ids in zip(sparse.features, lookup.values.split(ids_per_feature(lookup)), strict=True):
                if feature.table in counts:
                    counts[feature.table] += torch.bincount(ids, minlength=len(counts[feature.table]))
    return {
        name: count.argsort(descending=True, stable=True)[: int((count > 0).sum())] for name, count in counts.items()
    }
