"""`shardwright serve-tables`: own rows of tables for the ranks of a run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def serve_tables(
    bind: Annotated[str, typer.Option(help="Address to listen on; port 0: any free port.")] = "tcp://127.0.0.1:5800",
    keys: Annotated[str, typer.Option(help="The servers' key file; required if ranks are on other hosts.")] = "",
    journal: Annotated[
        Path | None, typer.Option(help="Folder where updates are written, so that a killed server loses none.")
    ] = None,
    new_keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Create server.keys and trainer.keys in DIR, and end.")
    ] = None,
    parent: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Own rows of tables for the ranks of a run, one run at a time, until interrupted.

    \b
    shardwright serve-tables                                  on this host
    shardwright serve-tables --journal DIR                    and start it again after it was killed: the run goes on
    shardwright serve-tables --bind tcp://*:5800 --keys DIR/server.keys           for ranks on other hosts
    \b
    In a recipe: servers.addresses=["tcp://127.0.0.1:5800"]; servers.start=1 starts servers with the run.
    In a training script: plan = keep_on_servers(plan, {"table": Bounded(0, 0, copies)}), then
    build(model, plan, mesh_for(plan, servers=TableServers(("tcp://127.0.0.1:5800",)))): docs/servers.md.
    """
    import signal
    from contextlib import closing

    import torch

    from shardwright.comm.transport.keys import create_key_files, load_keys
    from shardwright.embeddings.service.server import TableServer
    from shardwright.runtime.launch import launcher
    from shardwright.runtime.launch.signals import STOP_SIGNALS

    if new_keys is not None:
        for path in create_key_files(new_keys, "server"):
            Console().print(f"keys  {path}", highlight=False, soft_wrap=True)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if parent:  # a run, which ends it
        launcher.die_with_parent(parent)
        torch.set_num_threads(1)  # ranks use the other cores
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    with closing(TableServer(bind, keys=load_keys(keys, "server"), journal=journal)) as server:
        print(f"serving {server.address}", flush=True)
        try:
            server.run(lambda line: print(line, flush=True))
        except KeyboardInterrupt:
            print("ended", flush=True)
