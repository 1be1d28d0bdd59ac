"""Create, use and remove a lab: an emulated cluster on this machine.

    with Lab(Shape((Host(ranks=2, uplink="1gbit"),) * 2)) as lab:
        lab.run([sys.executable, "train.py"])

The state of a lab is only in the system: names of namespaces and cgroups, and a file with its shape. So another process
can list, use and remove it, and everything that a killed process leaves behind can be found.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shardwright.errors import UserError
from shardwright.lab import cpu_quota, launch, network
from shardwright.lab.launch import LineCallback, RankExit
from shardwright.lab.network import LinkTraffic
from shardwright.lab.shape import Shape
from shardwright.spec import files

STATE_DIRECTORY = Path("/run/shardwright")


class Lab:
    """An emulated cluster, up from `start` until `remove_lab`, or inside a `with` block."""

    def __init__(self, shape: Shape, name: str = "lab") -> None:
        if not re.fullmatch(r"[a-z0-9]{1,16}", name):
            raise UserError(f'lab "{name}": wanted a name of 1 to 16 lowercase letters and digits')
        shape.verify()
        self.shape, self.name = shape, name

    @classmethod
    def open(cls, name: str) -> "Lab":
        """Open the lab of this name, which must be up."""
        path = STATE_DIRECTORY / f"{name}.json"
        if not path.exists():
            raise no_such_lab_error(name)
        return cls(files.read(Shape, path), name)

    def start(self) -> None:
        """Create the network and the CPU quotas; removes everything again if that fails. Needs root."""
        if os.geteuid() != 0:
            raise UserError("shardwright lab up needs root; without it: shardwright lab run --shape FILE -- COMMAND")
        if self.name in list_labs():
            remedy = f"remove it with shardwright lab down --name {self.name}, or choose another --name"
            raise UserError(f'lab "{self.name}" is up already; {remedy}')
        launch.check_quotas(self.shape, sorted(os.sched_getaffinity(0)))
        STATE_DIRECTORY.mkdir(parents=True, exist_ok=True)
        try:
            (STATE_DIRECTORY / f"{self.name}.lock").touch(exist_ok=False)
        except FileExistsError:
            raise UserError(f'another process is creating lab "{self.name}"; choose another --name') from None
        try:
            network.create_network(self.name, self.shape)
            cpu_quota.create_groups(
                self.name, [self.shape.hosts[self.shape.host_of(r)].cpu for r in range(self.shape.num_ranks)]
            )
            files.write(self.shape, STATE_DIRECTORY / f"{self.name}.json")
        except BaseException:
            remove_lab(self.name)
            raise

    def run(
        self, command: Sequence[str], on_line: LineCallback = launch.print_line, timeout_seconds: float = 0.0
    ) -> RankExit:
        """Run a command as every rank and wait: see `launch.run`."""
        return launch.run(self.name, self.shape, command, on_line, timeout_seconds)

    def traffic(self) -> list[LinkTraffic]:
        """The bytes that each link has carried since the lab is up."""
        return network.traffic(self.name, self.shape)

    def cut(self, link: str, connected: bool = False) -> None:
        """Cut a link, such as `u0`, or connect it again."""
        network.cut(self.name, link, connected)

    def set_uplinks(self, rate: str, hosts: Sequence[int] | None = None) -> None:
        """Change the rate of the uplinks of these hosts, or of all, such as "100mbit", while ranks run."""
        network.set_uplinks(self.name, self.shape, rate, range(len(self.shape.hosts)) if hosts is None else hosts)

    def __enter__(self) -> "Lab":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        remove_lab(self.name)


def no_such_lab_error(name: str) -> UserError:
    other_labs = list_labs()
    remedy = f"labs that are up: {', '.join(other_labs)}" if other_labs else "create one with shardwright lab up"
    return UserError(f'no lab "{name}" is up; {remedy}')


def become_root() -> None:
    """Restart this command as the root of a new user namespace, unless it is root already."""
    if os.geteuid() == 0:
        return
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        raise UserError("this kernel lets only root make namespaces; run the lab as root")
    # The `ip` tool keeps names of namespaces in /run, which only the system's root may write.
    mount_and_run = ["sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$0" "$@"', sys.executable, "-m", "shardwright.cli"]
    os.execvp(unshare[0], [*unshare, *mount_and_run, *sys.argv[1:]])


def list_labs() -> list[str]:
    """The names of all labs, including the remains of killed ones."""
    prefix = len(network.NAMESPACE_PREFIX)
    names = {name[prefix:].rsplit("-", 1)[0] for name in network.list_namespaces()} | set(cpu_quota.labs_with_groups())
    return sorted(names | {path.stem for path in STATE_DIRECTORY.glob("*.*")})


def is_complete(name: str) -> bool:
    """Whether a lab is fully up, not only the remains of one whose process was killed."""
    return (STATE_DIRECTORY / f"{name}.json").exists() and network.namespace(name, "net") in network.list_namespaces(
        name
    )


def remove_lab(name: str) -> None:
    """Kill the processes of a lab and remove it, also if it is incomplete or does not exist."""
    (STATE_DIRECTORY / f"{name}.json").unlink(missing_ok=True)
    cpu_quota.remove_groups(name)
    for namespace in network.list_namespaces(name):
        for pid in network.run_ip("netns", "pids", namespace).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    network.delete_network(name)
    (STATE_DIRECTORY / f"{name}.lock").unlink(missing_ok=True)
