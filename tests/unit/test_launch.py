"""The address of a job's store, the mapping of Slurm's variables, and why a rank ended."""

import os
import signal
import socket
from pathlib import Path

import pytest
from pool import free_port

from shardwright.comm import store
from shardwright.errors import UserError
from shardwright.runtime.launch import launcher
from shardwright.runtime.launch.supervisor import describe_exit


def listening_addresses(port: int) -> set[str]:
    """Addresses, in the kernel's notation, of the sockets that listen on a port."""
    texts = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for text in texts for line in text.splitlines()[1:]]
    addresses = [line[1].rpartition(":") for line in lines if line[3] == "0A"]
    return {address for address, _, number in addresses if int(number, 16) == port}


def test_a_store_listens_only_on_loopback():
    server = store.serve()
    assert listening_addresses(server.port) == {"0100007F"}
    client = store.connect("127.0.0.1", server.port)
    client.set("a", "b")
    assert server.get("a") == b"b"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_of_several_hosts_does_not_listen_on_loopback(host):
    port = free_port()
    server = store.serve(host, port, several_hosts=True)
    assert listening_addresses(port) == {"00000000"}
    del server
    other = store.serve("127.0.0.1", port)  # the same port, once it is free
    assert listening_addresses(other.port) == {"0100007F"}


def test_an_address_of_another_machine_is_an_error_on_one_host():
    port = free_port()
    with pytest.raises(UserError, match=f"MASTER_ADDR=203.0.113.77, MASTER_PORT={port}: rank 0 cannot listen there"):
        store.serve("203.0.113.77", port)
    server = store.serve("203.0.113.77", port, several_hosts=True)  # a gateway's, perhaps
    assert listening_addresses(server.port) == {"00000000"}


def test_a_used_port_and_an_unknown_host_name_are_errors():
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(UserError, match="Address already in use"):
        store.serve("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(UserError, match="MASTER_ADDR=no.such.host.invalid"):
        store.serve("no.such.host.invalid", 1)


def test_the_last_heartbeat_of_a_rank():
    attempt = store.open_attempt(store.serve(), 0, 2)
    assert store.last_heartbeat(attempt, 1) == ""
    for heartbeat, stage in (("0|no stage of step 0", ""), ("7|backward of step 12", "backward of step 12")):
        store.open_mesh(attempt, 1).set("beat/1", heartbeat)
        assert store.last_heartbeat(attempt, 1) == stage
        assert store.last_heartbeat(attempt, 0) == ""


@pytest.mark.parametrize(
    ("node", "local"), [({"SLURM_NTASKS_PER_NODE": "2"}, "2"), ({"SLURM_STEP_NUM_NODES": "2"}, "2"), ({}, "4")]
)
def test_ranks_of_each_host_under_slurm(monkeypatch, node, local):
    """Without --ntasks-per-node, Slurm spreads tasks over the nodes of the step, not only this host."""
    slurm = {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", **node}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert launcher.join_launch()
    assert (os.environ["LOCAL_WORLD_SIZE"], os.environ["MASTER_ADDR"]) == (local, "n1")


def test_descriptions_of_exit_codes():
    assert describe_exit(7) == "ended with exit code 7"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV (signal 11)"
    assert describe_exit(-99) == "was killed by signal 99 (signal 99)"
    assert "memory ran out" in describe_exit(-signal.SIGKILL, True)
    assert "memory" not in describe_exit(-signal.SIGTERM, True)
