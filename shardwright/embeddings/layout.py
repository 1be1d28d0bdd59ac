"""Turn a plan's rectangles into each rank's table shards, fused into table groups, and their clients.

The rows of a table are divided into row ranges at every row where some rectangle begins or ends. A table shard is one
row range with all of its columns that a rank holds. A rank uses its own replica of a shard; ranks without one
are assigned to replicas in nearly equal contiguous blocks, so that blocks that hold full copies exchange nothing.
Shards of a rank with the same clients and the same kind of update and of ids form a fused table group: one lookup, one
update.

If several ranks of a host hold rows of the same columns, their partial sums for samples of another host are added
before they cross hosts (host reduce), by the rank with the same index in its host as the sample's rank has in its own.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.spec.plan import Bounded, Rect, TablePlan
from shardwright.spec.workload import Feature, Pooling, Table

Span = tuple[int, int]
ColumnRanges = tuple[Span, ...]
# Replicas, whether the update needs full rows, clients, whether it has a host reduce, whether tables grow, bounds.
_GroupKey = tuple[tuple[int, ...], bool, tuple[int, ...], bool, bool, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TableShard:
    """Row positions lo..hi of a table, in ascending column ranges; each of `ranks` holds a replica."""

    table: int
    range_index: int
    rows: Span
    cols: ColumnRanges
    ranks: tuple[int, ...]

    @property
    def dim(self) -> int:
        return sum(end - start for start, end in self.cols)


@dataclass(frozen=True, slots=True)
class IdStream:
    """Ids looked up in one shard of a table group: of a feature, or (None) the distinct rows of the shard's table."""

    shard_index: int
    feature: int | None
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class TableGroup:
    """A fused table group: shards of one rank that are looked up in one call and updated in one call.

    Replicated groups have the same order on all ranks, which therefore issue their collectives in the same order: waits
    cannot deadlock.
    """

    clients: tuple[int, ...]  # ranks that send requests to it
    shards: tuple[TableShard, ...]
    streams: tuple[IdStream, ...]  # streams of features first
    replicas: tuple[int, ...]  # the ranks that hold a replica of the group, its own rank included
    needs_column_reduce: bool  # whether its update needs sums over full rows, whose other columns are on other ranks
    needs_host_reduce: bool = False  # whether its vectors are partial sums, to be added inside its host
    # Of tables with bounded staleness: columns, pull and push. Other ranks read copies of such rows; without clients.
    bounded: tuple[int, ...] = ()

    @property
    def pooled(self) -> tuple[IdStream, ...]:
        return tuple(stream for stream in self.streams if stream.feature is not None)

    @property
    def unpooled(self) -> tuple[IdStream, ...]:
        return self.streams[len(self.pooled) :]

    @property
    def unpooled_dims(self) -> list[int]:
        return [self.shards[stream.shard_index].dim for stream in self.unpooled]

    @property
    def feature_columns(self) -> tuple[tuple[int, ColumnRanges], ...]:
        """(feature, columns) of its pooled vectors, in their order in a row."""
        return tuple(
            (ids.feature, self.shards[ids.shard_index].cols) for ids in self.streams if ids.feature is not None
        )

    @property
    def width(self) -> int:
        return _width(self.feature_columns)


@dataclass(frozen=True, slots=True)
class HostReduce:
    """Sum at one rank of its host's partial vectors, for the ranks of the same index in every host."""

    clients: tuple[int, ...]
    contributors: tuple[tuple[int, int], ...]  # (rank, index of a table group of that rank)
    feature_columns: tuple[tuple[int, ColumnRanges], ...]  # (feature, columns) of the sums, in their order in a row

    @property
    def width(self) -> int:
        return _width(self.feature_columns)


@dataclass(frozen=True, slots=True)
class Layout:
    """Table groups and host reduces of all ranks; equal on every rank."""

    row_boundaries: tuple[tuple[int, ...], ...]  # by table: first row of each row range, then the number of rows
    table_groups: tuple[tuple[TableGroup, ...], ...]  # by rank
    row_exchange_tables: frozenset[int]  # tables whose distinct rows are exchanged, each once per client
    host_reduces: tuple[HostReduce | None, ...]  # by rank
    num_copies: Mapping[int, int]  # by table with bounded staleness, the rows that a rank may have copies of
    served: tuple[tuple[TableGroup, ...], ...] = ()  # by table server

    @property
    def has_shards(self) -> bool:
        """Whether ranks own rows; if not, table servers own all."""
        return any(self.table_groups)

    def request_targets(self, client: int) -> Iterator[tuple[int, TableGroup]]:
        """The (rank, table group) to which a rank sends requests, in the order of its messages."""
        for rank, groups in enumerate(self.table_groups):
            for group in groups:
                if client in group.clients:
                    yield rank, group

    def response_sources(self, client: int) -> Iterator[tuple[int, int, TableGroup | HostReduce]]:
        """The sources of a rank's vectors, in message order: (rank, index of its table group, the group).
        A rank's host reduce follows its groups, with index len(groups)."""
        for rank, (groups, host_reduce) in enumerate(zip(self.table_groups, self.host_reduces, strict=True)):
            for index, group in enumerate(groups):
                if client in group.clients and not group.needs_host_reduce:
                    yield rank, index, group
            if host_reduce is not None and client in host_reduce.clients:
                yield rank, len(groups), host_reduce


def build_layout(
    tables: Sequence[Table],
    features: Sequence[Feature],
    plans: Mapping[str, TablePlan],
    num_ranks: int,
    *,
    num_servers: int = 0,
    needs_full_rows: bool = False,
    ranks_per_host: int = 0,
) -> Layout:
    """Build the layout of a plan; equal on every rank. Table servers have the numbers after those of the ranks.
    `needs_full_rows`: the optimizer needs sums over all columns of a row. `ranks_per_host`: size of the hosts that
    reduce partial vectors; 0: none do."""
    table_index = {table.name: index for index, table in enumerate(tables)}
    reads: list[tuple[int, Pooling]] = [(table_index[feature.table], feature.pooling) for feature in features]
    names = {feature.table for feature in features if feature.pooling == "none"}
    names |= {plan.table for plan in plans.values() if plan.travel == "rows"}
    on_servers = {table_index[plan.table] for plan in plans.values() if plan.rects[0].ranks[0] >= num_ranks}
    syncs = {table_index[plan.table]: plan.placement.sync for plan in plans.values()}
    bounded = {
        index: sync
        for index, sync in syncs.items()
        if isinstance(sync, Bounded) and (index in on_servers or num_ranks > 1 and sync.has_copies)
    }
    exchanged = frozenset(index for index, table in enumerate(tables) if table.name in names) | bounded.keys()
    shards_by_rank: list[dict[_GroupKey, list[TableShard]]] = [{} for _ in range(num_ranks + num_servers)]
    boundaries = []
    for index, table in enumerate(tables):
        table_bounds = sorted({0, table.rows, *(row for rect in plans[table.name].rects for row in rect.rows)})
        boundaries.append(tuple(table_bounds))
        shards = list(_table_shards(index, plans[table.name].rects, table_bounds))
        host_reduced = _host_reduced(shards, ranks_per_host, num_ranks) if index not in exchanged else set()
        for rank, shard in shards:
            clients = tuple(
                client for client in range(num_ranks) if replica_for(shard.ranks, client, num_ranks) == rank
            )
            by_row = needs_full_rows and shard.dim < table.dim
            replicas = shard.ranks if len(shard.ranks) > 1 else (rank,)
            in_host = len(shard.ranks) == 1 and (rank, shard.cols) in host_reduced
            grows = table.growth is not None
            bounds = (table.dim, bounded[index].pull, bounded[index].push) if index in bounded else ()
            key = (replicas, by_row, () if bounds else clients, in_host, grows, bounds)
            shards_by_rank[rank].setdefault(key, []).append(shard)
    groups = tuple(
        tuple(
            TableGroup(
                clients,
                tuple(shards),
                () if bounds else tuple(_streams(shards, reads, boundaries, exchanged)),
                replicas,
                by_row,
                in_host,
                bounds,
            )
            for (replicas, by_row, clients, in_host, _, bounds), shards in sorted(
                by_kind.items(), key=lambda item: item[0]
            )
        )
        for by_kind in shards_by_rank
    )
    num_copies = {index: sync.copies for index, sync in bounded.items()}
    groups, served = groups[:num_ranks], groups[num_ranks:]
    host_reduces = tuple(_host_reduces(groups, ranks_per_host))
    return Layout(tuple(boundaries), groups, exchanged, host_reduces, num_copies, served)


def replica_for(ranks: Sequence[int], client: int, num_ranks: int) -> int:
    """The rank whose replica a client uses: itself if it has one, else one rank per run of clients."""
    return client if client in ranks else ranks[client * len(ranks) // num_ranks]


def _table_shards(table: int, rects: Sequence[Rect], bounds: Sequence[int]) -> Iterator[tuple[int, TableShard]]:
    """The (rank, shard) of a table, by row range and then by rank."""
    range_at = {row: index for index, row in enumerate(bounds)}
    columns: dict[tuple[int, int, tuple[int, ...]], list[Span]] = {}
    for rect in rects:
        for index in range(range_at[rect.rows[0]], range_at[rect.rows[1]]):
            for rank in rect.ranks:
                columns.setdefault((index, rank, tuple(sorted(rect.ranks))), []).append(rect.cols)
    for (index, rank, ranks), cols in sorted(columns.items()):
        yield rank, TableShard(table, index, (bounds[index], bounds[index + 1]), tuple(_merge_spans(cols)), ranks)


def _host_reduced(shards: Sequence[tuple[int, TableShard]], size: int, num_ranks: int) -> set[tuple[int, ColumnRanges]]:
    """The (rank, columns) whose other rows are on other ranks of the host: they need a host reduce.
    Hosts have `size` ranks; with a single host there is no host reduce. Shards with replicas are excluded."""
    if not 1 < size < num_ranks:
        return set()
    ranks: dict[tuple[int, ColumnRanges], set[int]] = {}
    for rank, shard in shards:
        if len(shard.ranks) == 1:
            ranks.setdefault((rank // size, shard.cols), set()).add(rank)
    return {(rank, cols) for (_, cols), holders in ranks.items() if len(holders) > 1 for rank in holders}


def _host_reduces(table_groups: Sequence[Sequence[TableGroup]], size: int) -> Iterator[HostReduce | None]:
    """The host reduce at each rank, or None; hosts have `size` ranks."""
    for rank in range(len(table_groups)):
        host = range(rank // size * size, rank // size * size + size) if size else ()
        groups = tuple((peer, i) for peer in host for i, g in enumerate(table_groups[peer]) if g.needs_host_reduce)
        columns = dict.fromkeys(pair for peer, i in groups for pair in table_groups[peer][i].feature_columns)
        clients = tuple(range(rank % size, len(table_groups), size)) if size else ()
        yield HostReduce(clients, groups, tuple(columns)) if groups else None


def _width(feature_columns: Sequence[tuple[int, ColumnRanges]]) -> int:
    return sum(end - start for _, cols in feature_columns for start, end in cols)


def _merge_spans(spans: Sequence[Span]) -> Iterator[Span]:
    """The spans in ascending order; adjacent spans are merged."""
    start, end = min(spans)
    for low, high in sorted(spans)[1:]:
        if low != end:
            yield start, end
            start = low
        end = high
    yield start, end


def _streams(
    shards: Sequence[TableShard],
    reads: Sequence[tuple[int, Pooling]],
    bounds: Sequence[Sequence[int]],
    exchanged: Collection[int],
) -> Iterator[IdStream]:
    """The streams of a table group; `reads` has (table, pooling) of each feature.
    Tables with several row ranges look up means as sums: a shard has only a part of each bag's ids."""
    for index, shard in enumerate(shards):
        for feature, (table, pooling) in enumerate(reads):
            if table == shard.table and table not in exchanged:
                yield IdStream(index, feature, "sum" if len(bounds[table]) > 2 else pooling)
    for index, shard in enumerate(shards):
        if shard.table in exchanged:
            yield IdStream(index, None, "none")
