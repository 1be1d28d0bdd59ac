"""Connect the ranks of a job to the table servers of its plan."""

import secrets

from shardwright.comm.mesh import Mesh
from shardwright.comm.transport.servers import Caller, ServerConnector, TableServers
from shardwright.embeddings.exchange import ShardedTables
from shardwright.embeddings.service import remote_rows
from shardwright.errors import UserError
from shardwright.runtime.rank_group import RankGroup
from shardwright.spec.plan import Plan


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
    caller = Caller(run, ranks.rank, heartbeat.find_lost_peer) if heartbeat is not None else Caller(run, ranks.rank)
    mesh.server_connector = ServerConnector(mesh.servers, caller)
    return mesh.server_connector


def open_tables(sharded: ShardedTables, ranks: RankGroup) -> None:
    """Give the rows of tables to their servers; each rank sends its share. All ranks call it."""
    error = ""
    try:
        sharded.served.open()
        share = ranks.rank, ranks.size
        rectangles = remote_rows.table_rectangles(sharded.served, sharded.layout, sharded.orders, share)
        remote_rows.send_initial_rows(rectangles, sharded.bags)
    except UserError as failure:
        error = str(failure)
    if errors := [each for each in ranks.all_gather_text(error) if each]:
        raise UserError(errors[0])
