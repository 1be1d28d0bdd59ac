"""Connect the ranks of a job to the table servers of its plan."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.comm.mesh import Mesh
from shardwright.comm.transport.servers import Caller, ServerConnector, TableServers
from shardwright.config.servers import ServerSettings
from shardwright.embeddings.exchange import ShardedTables
from shardwright.embeddings.layout import Layout
from shardwright.embeddings.service import remote_rows
from shardwright.embeddings.service.server_store import ServerStores
from shardwright.errors import UserError
from shardwright.layers.embedding import EmbeddingTables
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.supported import is_cached_from_servers
from shardwright.spec.plan import Plan


def make_servers(settings: ServerSettings) -> TableServers | None:
    """The servers whose addresses a recipe has; None if it has none."""
    if not settings.addresses:
        return None
    return TableServers(settings.addresses, settings.keys, settings.timeout)


def close_connections(mesh: Mesh) -> None:
    """End this rank's use of its servers."""
    if mesh.server_connector is not None:
        mesh.server_connector.close()


def check_servers(plan: Plan, servers: TableServers | None) -> None:
    """Raise unless there is an address for each of the plan's servers."""
    num = len(servers.addresses) if servers is not None else 0
    if num != plan.servers:
        raise UserError(
            f"the plan has {plan.servers} table servers, and {num} are given: pass "
            "build(model, plan, mesh_for(plan, servers=TableServers(addresses))) with an address for each"
        )


def connect_servers(mesh: Mesh) -> ServerConnector | None:
    """All ranks call it: they agree on an id of this run. Ends an earlier job of this mesh."""
    if mesh.servers is None:
        return None
    if mesh.server_connector is not None:
        mesh.server_connector.close()
    ranks = RankGroup(mesh)
    run = ranks.broadcast_text(secrets.token_hex(8) if ranks.is_first else "")
    heartbeat = mesh.heartbeat
    explain = {} if heartbeat is None else {"explain_wait": heartbeat.find_lost_peer}
    caller = Caller(run, ranks.rank, mesh.sent, **explain)
    mesh.server_connector = ServerConnector(mesh.servers, caller)
    return mesh.server_connector


def open_tables(sharded: ShardedTables, ranks: RankGroup) -> None:
    """Give the rows of tables to their servers; each rank sends its share. All ranks call it."""
    with _same_on_all(ranks):
        sharded.served.open()
        share = ranks.rank, ranks.size
        rectangles = remote_rows.table_rectangles(sharded.served, sharded.layout, sharded.orders, share)
        remote_rows.send_initial_rows(rectangles, sharded.bags)


def open_stores(
    bags: EmbeddingTables, layout: Layout, plan: Plan, ranks: RankGroup, connector: ServerConnector | None
) -> ServerStores | None:
    """The stores on servers of tables whose rows do not all fit this rank; None if there are none. All ranks call
    it."""
    by_name = {table.table: table for table in plan.tables}
    cached = {index for index, table in enumerate(bags.tables) if is_cached_from_servers(by_name[table.name])}
    if not cached or connector is None:
        return None
    if bags.optimizer is None:
        raise UserError("tables on servers are trained, and these have no optimizer: set one, or keep them on disk")
    stores = ServerStores(bags, layout, cached, connector, ranks.rank)
    with _same_on_all(ranks):
        stores.open()
    return stores


@contextmanager
def _same_on_all(ranks: RankGroup) -> Iterator[None]:
    """Raise the same error on all ranks."""
    error = ""
    try:
        yield
    except UserError as failure:
        error = str(failure)
    if errors := [each for each in ranks.all_gather_text(error) if each]:
        raise UserError(errors[0])
