"""A lab from coming up to going down.

    with Lab(Shape((Host(ranks=2, uplink="1gbit"),) * 2)) as lab:
        lab.run([sys.executable, "train.py"])

What is up is known by names in the system alone (and a file that says its shape), so that another process can look at
it, use it and remove it, and so that nothing a killed process left behind is lost from sight.
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
    def __init__(self, shape: Shape, name: str = "lab") -> None:
        if not re.fullmatch(r"[a-z0-9]{1,16}", name):
            raise UserError(f'lab "{name}"; wanted 1 to 16 small letters and digits')
        shape.verify()
        self.shape, self.name = shape, name

    @classmethod
    def open(cls, name: str) -> "Lab":
        """The lab of this name that is up."""
        path = STATE_DIRECTORY / f"{name}.json"
        if not path.exists():
            raise no_such_lab_error(name)
        return cls(files.read(Shape, path), name)

    def start(self) -> None:
        if os.geteuid() != 0:
            raise UserError("a lab that stays up needs root; without: shardwright lab run --shape FILE -- COMMAND")
        if self.name in list_labs():
            raise UserError(f'lab "{self.name}" is up already; shardwright lab down, or choose another --name')
        launch.check_quotas(self.shape, sorted(os.sched_getaffinity(0)))
        STATE_DIRECTORY.mkdir(parents=True, exist_ok=True)
        try:
            (STATE_DIRECTORY / f"{self.name}.lock").touch(exist_ok=False)
        except FileExistsError:
            raise UserError(f'lab "{self.name}" is coming up already; choose another --name') from None
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
        return launch.run(self.name, self.shape, command, on_line, timeout_seconds)

    def traffic(self) -> list[LinkTraffic]:
        return network.traffic(self.name, self.shape)

    def cut(self, link: str, connected: bool = False) -> None:
        network.cut(self.name, link, connected)

    def __enter__(self) -> "Lab":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        remove_lab(self.name)


def no_such_lab_error(name: str) -> UserError:
    others = list_labs()
    return UserError(f'no lab "{name}" is up; ' + (f"up: {', '.join(others)}" if others else "shardwright lab up"))


def become_root() -> None:
    """Start this command anew as the root of a user namespace of its own, unless it is root already."""
    if os.geteuid() == 0:
        return
    alone = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        raise UserError("this kernel lets only root make namespaces; run the lab as root")
    # The tools keep names of namespaces in /run, which only the system's root may write.
    with_run = ["sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$0" "$@"', sys.executable, "-m", "shardwright.cli"]
    os.execvp(alone[0], [*alone, *with_run, *sys.argv[1:]])


def list_labs() -> list[str]:
    """The names of the labs of which anything is there."""
    prefix = len(network.NAMESPACE_PREFIX)
    found = {name[prefix:].rsplit("-", 1)[0] for name in network.list_namespaces()} | set(cpu_quota.labs_with_groups())
    return sorted(found | {path.stem for path in STATE_DIRECTORY.glob("*.*")})


def is_complete(name: str) -> bool:
    """Whether all of a lab is there, not only what a killed process left behind."""
    return (STATE_DIRECTORY / f"{name}.json").exists() and network.namespace(name, "net") in network.list_namespaces(
        name
    )


def remove_lab(name: str) -> None:
    """Remove a lab and end what runs in it; what is not there is left out."""
    (STATE_DIRECTORY / f"{name}.json").unlink(missing_ok=True)
    cpu_quota.remove_groups(name)
    for place in network.list_namespaces(name):
        for pid in network.run_ip("netns", "pids", place).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    network.delete_network(name)
    (STATE_DIRECTORY / f"{name}.lock").unlink(missing_ok=True)
