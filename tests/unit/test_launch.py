"""The address on which a job's store listens, the mapping of slurm's variables, and the cause of a rank's end."""

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


def listens_at(port: int) -> set[str]:
    """The addresses, in the kernel's notation, of sockets that listen on a port."""
    texts = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for text in texts for line in text.splitlines()[1:]]
    places = [line[1].rpartition(":") for line in lines if line[3] == "0A"]
    return {address for address, _, number in places if int(number, 16) == port}


def test_a_store_listens_on_loopback_alone():
    served = store.serve()
    assert listens_at(served.port) == {"0100007F"}
    other = store.connect("127.0.0.1", served.port)
    other.set("a", "b")
    assert served.get("a") == b"b"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_beyond_one_host_loopback_reaches_nobody(host):
    port = free_port()
    served = store.serve(host, port, several_hosts=True)
    assert listens_at(port) == {"00000000"}
    del served
    again = store.serve("127.0.0.1", port)  # the same port, once nobody holds it
    assert listens_at(again.port) == {"0100007F"}


def test_an_address_of_another_machine():
    port = free_port()
    with pytest.raises(UserError, match=f"MASTER_ADDR=203.0.113.77, MASTER_PORT={port}: rank 0 cannot listen there"):
        store.serve("203.0.113.77", port)
    served = store.serve("203.0.113.77", port, several_hosts=True)  # a gateway's, perhaps
    assert listens_at(served.port) == {"00000000"}


def test_a_port_that_is_taken_and_a_name_that_is_none():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="Address already in use"):
        store.serve("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError, match="MASTER_ADDR=no.such.host.invalid"):
        store.serve("no.such.host.invalid", 1)


def test_where_a_rank_was_last():
    attempt = store.open_attempt(store.serve(), 0, 2)
    assert store.last_heartbeat(attempt, 1) == ""
    for beat, where in (("0|no stage of step 0", ""), ("7|backward of step 12", "backward of step 12")):
        store.open_mesh(attempt, 1).set("beat/1", beat)
        assert store.last_heartbeat(attempt, 1) == where
        assert store.last_heartbeat(attempt, 0) == ""


@pytest.mark.parametrize(
    ("told", "local"), [({"SLURM_NTASKS_PER_NODE": "2"}, "2"), ({"SLURM_STEP_NUM_NODES": "2"}, "2"), ({}, "4")]
)
def test_ranks_of_each_host_under_slurm(monkeypatch, told, local):
    """Without --ntasks-per-node, slurm spreads tasks over the nodes of the step: they are not all on this host."""
    slurm = {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", **told}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert launcher.join_launch()
    assert (os.environ["LOCAL_WORLD_SIZE"], os.environ["MASTER_ADDR"]) == (local, "n1")


def test_what_ended_a_process():
    assert describe_exit(7) == "ended with exit code 7"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV (signal 11)"
    assert describe_exit(-99) == "was killed by signal 99 (signal 99)"
    assert "memory ran out" in describe_exit(-signal.SIGKILL, True) and "memory" not in describe_exit(
        -signal.SIGTERM, True
    )
