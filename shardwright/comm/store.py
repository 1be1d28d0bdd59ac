"""The key-value store for the rendezvous of a job's ranks, bound to one address.

torch's own rendezvous listens on every interface. This store gets a socket that is already bound: to loopback if all
ranks are on one host, else to the address in MASTER_ADDR.
"""

import errno
import socket
from contextlib import closing
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shardwright.errors import UserError

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = ("localhost", LOOPBACK, "::1")
LOOPBACK_INTERFACE = "lo"
BACKLOG = 1024  # connections of ranks that wait to be accepted
BEFORE_STEPS = "no stage"  # the stage of a rank before its first step


def serve(host: str = LOOPBACK, port: int = 0, *, several_hosts: bool = False, seconds: float = 300.0) -> Any:
    """Serve a store that listens only on the address of `host`; port 0: any free port.

    With several hosts it listens on every interface if `host` is not an address of this machine that others can
    reach, such as a loopback entry in /etc/hosts or the address of a gateway.
    """
    with closing(_open_listener(host, port, several_hosts)) as listener:
        address, port = listener.getsockname()[:2]
        return TCPStore(
            LOOPBACK if ip_address(address).is_unspecified else address,  # where the server connects to itself
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=listener.detach(),
        )


def connect(host: str, port: int, *, seconds: float = 300.0) -> Any:
    """Open a separate connection to a store; waits until the store is served."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def open_attempt(store: Any, restarts: int, world: int) -> Any:
    """The part of a store that belongs to one attempt (the launch, or a restart).

    `world` is part of the prefix because a launcher that continues with fewer ranks after the loss of a host keeps its
    store and counts no restart.
    """
    return PrefixStore(f"shardwright/{restarts}/{world}", store)


def open_mesh(attempt: Any, rank: int) -> Any:
    """The part of an attempt's store for the next mesh; every rank makes its meshes in the same order."""
    return PrefixStore(str(attempt.add(f"meshes/{rank}", 1)), attempt)


def last_heartbeat(attempt: Any, rank: int) -> str:
    """A rank's stage at its last heartbeat, such as "backward of step 12"; "" if it sent none."""
    mesh = PrefixStore(str(attempt.add(f"meshes/{rank}", 0)), attempt)
    key = f"beat/{rank}"
    if not mesh.check([key]):
        return ""
    position = mesh.get(key).decode().partition("|")[2]
    return "" if position.startswith(BEFORE_STEPS) else position


def _open_listener(host: str, port: int, several_hosts: bool) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UserError(f"MASTER_ADDR={host}: {error.strerror}; give an address of the host of rank 0") from None
    reachable = [info for info in addresses if not (several_hosts and ip_address(info[4][0]).is_loopback)]
    failure = OSError(errno.EADDRNOTAVAIL, "no address that other hosts can reach")
    for family, _, _, _, address in reachable:
        try:
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            failure = error
    if several_hosts and failure.errno == errno.EADDRNOTAVAIL:
        return socket.create_server(("", port), backlog=BACKLOG)
    raise UserError(
        f"MASTER_ADDR={host}, MASTER_PORT={port}: rank 0 cannot listen there ({failure.strerror}); give an address of "
        "the host of rank 0 and a free port"
    ) from None
