"""A plan's rectangles as what each rank holds and whom it serves.

Rectangles of a table are cut where any of them is, so that its rows fall into bands; a piece is a band at a rank, with
all columns of it that the rank has. A rank asks the replica of a piece that it has itself; where it has none, replicas
are asked by equal runs of ranks, so that groups of ranks with a copy of all tables each ask among themselves. Pieces
of a rank that serve the same ranks and are updated in the same way are a bank: one lookup and one update.

Where several ranks of a host have rows of the same columns, what they found for a sample of another host is added up
before it leaves: at the rank that has, in its host, the place that the sample's rank has in its own.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.spec.plan import Rect, TablePlan
from shardwright.spec.workload import Feature, Pooling, Table

Span = tuple[int, int]
ColumnRanges = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class TableShard:
    """Rows lo..hi of a table, by number, in these columns, ascending; `ranks` all have it."""

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
    """Ids of one feature that go to one piece of a bank, by number; without a feature the distinct rows of a table."""

    shard_index: int
    feature: int | None
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class TableGroup:
    """All ranks have those with replicas in one order: who waits for whom is then never a circle."""

    clients: tuple[int, ...]
    shards: tuple[TableShard, ...]
    streams: tuple[IdStream, ...]  # those of features first
    replicas: tuple[int, ...]  # the ranks that have the same bank, and its rank alone where none has
    needs_column_reduce: bool  # whether other ranks have more columns of these rows, which the update must know of
    needs_host_reduce: bool = False  # whether its vectors are parts, which meet those of other ranks of its host

    @property
    def pooled(self) -> tuple[IdStream, ...]:
        return tuple(stream for stream in self.streams if stream.feature is not None)

    @property
    def unpooled(self) -> tuple[IdStream, ...]:
        return self.streams[len(self.pooled) :]

    @property
    def feature_columns(self) -> tuple[tuple[int, ColumnRanges], ...]:
        """Features and columns of its pooled vectors, side by side."""
        return tuple(
            (one.feature, self.shards[one.shard_index].cols) for one in self.streams if one.feature is not None
        )

    @property
    def width(self) -> int:
        return _width(self.feature_columns)


@dataclass(frozen=True, slots=True)
class HostReduce:
    """Parts of vectors from all ranks of a host, added up at one of them for the ranks of its place in their hosts."""

    clients: tuple[int, ...]
    contributors: tuple[tuple[int, int], ...]  # ranks and numbers of their banks
    feature_columns: tuple[tuple[int, ColumnRanges], ...]  # features and columns of the sums, side by side

    @property
    def width(self) -> int:
        return _width(self.feature_columns)


@dataclass(frozen=True, slots=True)
class Layout:
    """What all ranks know alike: the first rows of each table's bands, and every rank's banks and meeting."""

    row_boundaries: tuple[tuple[int, ...], ...]  # by table; ends with its number of rows
    table_groups: tuple[tuple[TableGroup, ...], ...]  # by rank
    row_exchange_tables: frozenset[int]  # tables of which each distinct row travels once
    host_reduces: tuple[HostReduce | None, ...]  # by rank

    def request_targets(self, client: int) -> Iterator[tuple[int, TableGroup]]:
        """The banks that a rank asks, and whose they are, in the order of its messages."""
        for rank, banks in enumerate(self.table_groups):
            for bank in banks:
                if client in bank.clients:
                    yield rank, bank

    def response_sources(self, client: int) -> Iterator[tuple[int, int, TableGroup | HostReduce]]:
        """Who sends a rank its vectors, in the order of its messages: ranks, and numbers of their banks, behind these
        the meeting."""
        for rank, (banks, meeting) in enumerate(zip(self.table_groups, self.host_reduces, strict=True)):
            for number, bank in enumerate(banks):
                if client in bank.clients and not bank.needs_host_reduce:
                    yield rank, number, bank
            if meeting is not None and client in meeting.clients:
                yield rank, len(banks), meeting


def build_layout(
    tables: Sequence[Table],
    features: Sequence[Feature],
    plans: Mapping[str, TablePlan],
    num_ranks: int,
    *,
    needs_full_rows: bool = False,
    ranks_per_host: int = 0,
) -> Layout:
    """`whole_rows`: the optimizer looks at whole rows; `host`: how many ranks a host has inside which parts meet, 0:
    nowhere."""
    number_of = {table.name: number for number, table in enumerate(tables)}
    read: list[tuple[int, Pooling]] = [(number_of[one.table], one.pooling) for one in features]
    rows = {one.table for one in features if one.pooling == "none"}
    rows |= {plan.table for plan in plans.values() if plan.travel == "rows"}
    alone = frozenset(number for number, table in enumerate(tables) if table.name in rows)
    found: list[dict[tuple[tuple[int, ...], bool, tuple[int, ...], bool], list[TableShard]]] = [
        {} for _ in range(num_ranks)
    ]
    bands = []
    for number, table in enumerate(tables):
        cuts = sorted({0, table.rows, *(row for rect in plans[table.name].rects for row in rect.rows)})
        bands.append(tuple(cuts))
        pieces = list(_pieces(number, plans[table.name].rects, cuts))
        meeting = _meeting(pieces, ranks_per_host, num_ranks) if number not in alone else set()
        for rank, piece in pieces:
            clients = tuple(
                client for client in range(num_ranks) if replica_for(piece.ranks, client, num_ranks) == rank
            )
            part = needs_full_rows and piece.dim < table.dim
            replicas = piece.ranks if len(piece.ranks) > 1 else (rank,)
            meets = len(piece.ranks) == 1 and (rank, piece.cols) in meeting
            found[rank].setdefault((replicas, part, clients, meets), []).append(piece)
    banks = tuple(
        tuple(
            TableGroup(clients, tuple(pieces), tuple(_streams(pieces, read, bands, alone)), replicas, part, meets)
            for (replicas, part, clients, meets), pieces in sorted(mine.items(), key=lambda item: item[0])
        )
        for mine in found
    )
    return Layout(tuple(bands), banks, alone, tuple(_meetings(banks, ranks_per_host)))


def replica_for(ranks: Sequence[int], client: int, num_ranks: int) -> int:
    """Which replica a rank asks."""
    return client if client in ranks else ranks[client * len(ranks) // num_ranks]


def _pieces(table: int, rects: Sequence[Rect], cuts: Sequence[int]) -> Iterator[tuple[int, TableShard]]:
    """Of each rank, band by band."""
    at = {row: band for band, row in enumerate(cuts)}
    held: dict[tuple[int, int, tuple[int, ...]], list[Span]] = {}
    for rect in rects:
        for band in range(at[rect.rows[0]], at[rect.rows[1]]):
            for rank in rect.ranks:
                held.setdefault((band, rank, tuple(sorted(rect.ranks))), []).append(rect.cols)
    for (band, rank, ranks), cols in sorted(held.items()):
        yield rank, TableShard(table, band, (cuts[band], cuts[band + 1]), tuple(_joined(cols)), ranks)


def _meeting(pieces: Sequence[tuple[int, TableShard]], host: int, num_ranks: int) -> set[tuple[int, ColumnRanges]]:
    """The ranks, and columns there, of which other ranks of the host have other rows, for ranks of other hosts too."""
    if not 1 < host < num_ranks:
        return set()
    ranks: dict[tuple[int, ColumnRanges], set[int]] = {}
    for rank, piece in pieces:
        if len(piece.ranks) == 1:
            ranks.setdefault((rank // host, piece.cols), set()).add(rank)
    return {(rank, cols) for (_, cols), found in ranks.items() if len(found) > 1 for rank in found}


def _meetings(banks: Sequence[Sequence[TableGroup]], host: int) -> Iterator[HostReduce | None]:
    for rank in range(len(banks)):
        near = range(rank // host * host, rank // host * host + host) if host else ()
        parts = tuple((at, number) for at in near for number, bank in enumerate(banks[at]) if bank.needs_host_reduce)
        brought = dict.fromkeys(one for at, number in parts for one in banks[at][number].feature_columns)
        clients = tuple(range(rank % host, len(banks), host)) if host else ()
        yield HostReduce(clients, parts, tuple(brought)) if parts else None


def _width(brought: Sequence[tuple[int, ColumnRanges]]) -> int:
    return sum(end - start for _, cols in brought for start, end in cols)


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    """Ascending; those that touch as one."""
    start, end = min(spans)
    for low, high in sorted(spans)[1:]:
        if low != end:
            yield start, end
            start = low
        end = high
    yield start, end


def _streams(
    pieces: Sequence[TableShard],
    read: Sequence[tuple[int, Pooling]],
    bands: Sequence[Sequence[int]],
    alone: Collection[int],
) -> Iterator[IdStream]:
    """`read` has the table and pooling of each feature. No band knows how long a bag is: parts of means are sums."""
    for number, piece in enumerate(pieces):
        for feature, (table, pooling) in enumerate(read):
            if table == piece.table and table not in alone:
                yield IdStream(number, feature, "sum" if len(bands[table]) > 2 else pooling)
    for number, piece in enumerate(pieces):
        if piece.table in alone:
            yield IdStream(number, None, "none")
