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
from shardwright.lab.launch import Ended, Say
from shardwright.lab.network import Bytes
from shardwright.lab.shape import Shape
from shardwright.spec import files

SHAPES = Path("/run/shardwright")


class Lab:
    def __init__(self, shape: Shape, name: str = "lab") -> None:
        if not re.fullmatch(r"[a-z0-9]{1,16}", name):
            raise UserError(f'lab "{name}"; wanted 1 to 16 small letters and digits')
        shape.verify()
        self.shape, self.name = shape, name

    @classmethod
    def named(cls, name: str) -> "Lab":
        """The lab of this name that is up."""
        path = SHAPES / f"{name}.json"
        if not path.exists():
            raise none_up(name)
        return cls(files.read(Shape, path), name)

    def up(self) -> None:
        if os.geteuid() != 0:
            raise UserError("a lab that stays up needs root; without: shardwright lab run --shape FILE -- COMMAND")
        if self.name in up():
            raise UserError(f'lab "{self.name}" is up already; shardwright lab down, or choose another --name')
        launch.check_quotas(self.shape, sorted(os.sched_getaffinity(0)))
        SHAPES.mkdir(parents=True, exist_ok=True)
        try:
            (SHAPES / f"{self.name}.lock").touch(exist_ok=False)
        except FileExistsError:
            raise UserError(f'lab "{self.name}" is coming up already; choose another --name') from None
        try:
            network.up(self.name, self.shape)
            cpu_quota.up(self.name, [self.shape.hosts[self.shape.host_of(r)].cpu for r in range(self.shape.num_ranks)])
            files.write(self.shape, SHAPES / f"{self.name}.json")
        except BaseException:
            down(self.name)
            raise

    def run(self, command: Sequence[str], say: Say = launch.say, timeout_seconds: float = 0.0) -> Ended:
        return launch.run(self.name, self.shape, command, say, timeout_seconds)

    def traffic(self) -> list[Bytes]:
        return network.traffic(self.name, self.shape)

    def cut(self, link: str, connected: bool = False) -> None:
        network.cut(self.name, link, connected)

    def __enter__(self) -> "Lab":
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        down(self.name)


def none_up(name: str) -> UserError:
    others = up()
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


def up() -> list[str]:
    """The names of the labs of which anything is there."""
    prefix = len(network.PREFIX)
    found = {name[prefix:].rsplit("-", 1)[0] for name in network.namespaces()} | set(cpu_quota.names())
    return sorted(found | {path.stem for path in SHAPES.glob("*.*")})


def whole(name: str) -> bool:
    """Whether all of a lab is there, not only what a killed process left behind."""
    return (SHAPES / f"{name}.json").exists() and network.namespace(name, "net") in network.namespaces(name)


def down(name: str) -> None:
    """Remove a lab and end what runs in it; what is not there is left out."""
    (SHAPES / f"{name}.json").unlink(missing_ok=True)
    cpu_quota.down(name)
    for place in network.namespaces(name):
        for pid in network.ip("netns", "pids", place).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    network.down(name)
    (SHAPES / f"{name}.lock").unlink(missing_ok=True)
