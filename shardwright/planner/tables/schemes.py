"""Sharding schemes of a table: the four of Neo's 4-D parallelism, and their forms over the levels of the network.

A `Scheme` is all that the planner needs: how it shards a table on a cluster, its name in plans and pins, its position
in the search, its text in a plan's reasons, and TorchRec's name for it. To add a scheme, define a `Scheme` here, or in
your own package with an entry point:

    [project.entry-points."shardwright.schemes"]
    first-ranks = "my_package.schemes:FIRST_RANKS"

`shardwright check-scheme my_package.schemes` plans, trains, saves, loads and exports with it (docs/sharding.md).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import NamedTuple

from shardwright.errors import UserError, did_you_mean
from shardwright.planner.tables.sharding import DATA_PARALLEL, Sharding, TableLoad, even_column_shards
from shardwright.spec.cluster import Cluster

ENTRY_POINT_GROUP = "shardwright.schemes"


class SearchPosition(NamedTuple):
    """Positions in the three orders in which proposals try schemes, lowest first: from fewest bytes to best balance."""

    columns_first: float
    rows_first: float
    hosts_first: float


@dataclass(frozen=True, slots=True)
class Scheme:
    """A sharding scheme. `shardings` yields all shardings of a table under it; `describe` returns its text in reasons.

    `search` is None for a scheme that is used only if a table is pinned to it. `forbids_ranks` says where the shards
    are, if a pin must not set their ranks.
    """

    name: str
    shardings: Callable[[TableLoad, Cluster], Iterator[Sharding]]
    describe: Callable[[Sharding, TableLoad], str]
    search: SearchPosition | None = None
    torchrec: str = ""  # TorchRec's ShardingType; empty: none
    forbids_ranks: str = ""


def all_schemes() -> Mapping[str, Scheme]:
    """The schemes of this module, then those of installed packages, by name."""
    return _registered()


def register_scheme(scheme: Scheme) -> None:
    """Make a scheme known to plans and pins of this process."""
    registered = _registered()
    if registered.setdefault(scheme.name, scheme) != scheme:
        raise UserError(f'sharding scheme "{scheme.name}" is already defined; choose another name')


def find_scheme(name: str) -> Scheme:
    """The scheme of this name."""
    registered = _registered()
    if name not in registered:
        raise UserError(f'no sharding scheme "{name}"{did_you_mean(name, registered)}')
    return registered[name]


def enumerate_shardings(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    """Every sharding of a table under every scheme."""
    for scheme in _registered().values():
        yield from scheme.shardings(table_load, cluster)


@cache
def _registered() -> dict[str, Scheme]:
    schemes = {scheme.name: scheme for scheme in BUILT_IN}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        scheme = entry.load()
        if not isinstance(scheme, Scheme) or scheme.name in schemes:
            raise UserError(f'entry point "{entry.value}" of {ENTRY_POINT_GROUP} is no Scheme, or its name is taken')
        schemes[scheme.name] = scheme
    return schemes


def _data_parallel(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    yield DATA_PARALLEL


def _table_wise(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    yield Sharding("table")


def _column_wise(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    for num in even_column_shards(table_load):
        yield Sharding("column", num)


def _table_column_wise(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    for level in range(1, len(cluster.levels)):
        for num in even_column_shards(table_load):
            yield Sharding("table-column", num, within_levels=level)


def _table_row_wise(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    for level in _row_levels(table_load, cluster):
        yield Sharding("table-row", row_levels=level)


def _grid(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    for level in _row_levels(table_load, cluster):
        for num in even_column_shards(table_load):
            yield Sharding("column-row", num, row_levels=level)


def _row_wise(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    if table_load.table.rows >= cluster.num_ranks:
        yield Sharding("row", row_levels=len(cluster.levels))


def _replicas_table_wise(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    if replicas := _num_replicas(cluster):
        yield Sharding("copy-table", num_replicas=replicas)


def _replicas_column_wise(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    if replicas := _num_replicas(cluster):
        for num in even_column_shards(table_load):
            yield Sharding("copy-column", num, num_replicas=replicas)


def _replicas_row_wise(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    if (replicas := _num_replicas(cluster)) and 1 in _row_levels(table_load, cluster):
        yield Sharding("copy-row", row_levels=1, num_replicas=replicas)


def _row_levels(table_load: TableLoad, cluster: Cluster) -> list[int]:
    """Numbers of innermost levels, less than all, whose groups have at most as many ranks as the table has rows."""
    return [num for num in range(1, len(cluster.levels)) if table_load.table.rows >= cluster.group_size(num)]


def _num_replicas(cluster: Cluster) -> int:
    """The number of hosts, if there are several, each with several ranks; else 0."""
    return cluster.num_ranks // cluster.ranks_per_host if cluster.is_hierarchical else 0


def _columns_text(sharding: Sharding, table_load: TableLoad) -> str:
    return f"{sharding.column_shards} shards of {table_load.table.dim // sharding.column_shards} columns"


DATA = Scheme(
    "data",
    _data_parallel,
    lambda sharding, load: "data-parallel",
    torchrec="data_parallel",
    forbids_ranks="on every rank",
)
TABLE_WISE = Scheme(
    "table",
    _table_wise,
    lambda sharding, load: "table-wise",
    SearchPosition(columns_first=0, rows_first=0, hosts_first=1),
    "table_wise",
)
COLUMN_WISE = Scheme(
    "column",
    _column_wise,
    lambda sharding, load: f"column-wise, {_columns_text(sharding, load)}",
    SearchPosition(columns_first=1, rows_first=4, hosts_first=4),
    "column_wise",
)
TABLE_COLUMN_WISE = Scheme(
    "table-column",
    _table_column_wise,
    lambda sharding, load: f"table-column-wise, {_columns_text(sharding, load)} within one group of ranks",
    SearchPosition(columns_first=2, rows_first=2, hosts_first=2),
    "table_column_wise",
)
TABLE_ROW_WISE = Scheme(
    "table-row",
    _table_row_wise,
    lambda sharding, load: "table-row-wise, rows over one group of ranks",
    SearchPosition(columns_first=3, rows_first=1, hosts_first=0),
    "table_row_wise",
)
GRID = Scheme(
    "column-row",
    _grid,
    lambda sharding, load: f"grid, {_columns_text(sharding, load)}, the rows of each over a group of ranks",
    SearchPosition(columns_first=4, rows_first=3, hosts_first=3),
    "grid_shard",
)
ROW_WISE = Scheme(
    "row",
    _row_wise,
    lambda sharding, load: "row-wise over all ranks",
    SearchPosition(columns_first=5, rows_first=5, hosts_first=5),
    "row_wise",
    forbids_ranks="on every rank",
)
REPLICAS_TABLE_WISE = Scheme(
    "copy-table",
    _replicas_table_wise,
    lambda sharding, load: "a replica in every host, on one rank of it",
    SearchPosition(columns_first=-3, rows_first=-3, hosts_first=-3),
    forbids_ranks="in every group",
)
REPLICAS_COLUMN_WISE = Scheme(
    "copy-column",
    _replicas_column_wise,
    lambda sharding, load: f"a replica in every host, {_columns_text(sharding, load)}",
    SearchPosition(columns_first=-2, rows_first=-2, hosts_first=-2),
    forbids_ranks="in every group",
)
REPLICAS_ROW_WISE = Scheme(
    "copy-row",
    _replicas_row_wise,
    lambda sharding, load: "a replica in every host, rows over its ranks",
    SearchPosition(columns_first=-1, rows_first=-1, hosts_first=-1),
    forbids_ranks="in every group",
)
BUILT_IN = (
    TABLE_WISE,
    ROW_WISE,
    COLUMN_WISE,
    DATA,
    TABLE_ROW_WISE,
    TABLE_COLUMN_WISE,
    GRID,
    REPLICAS_TABLE_WISE,
    REPLICAS_COLUMN_WISE,
    REPLICAS_ROW_WISE,
)
