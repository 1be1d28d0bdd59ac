"""Look at the machines this job runs on: a Cluster of what was found, by any launch of any number of ranks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from shardwright.comm import collective
from shardwright.comm.mesh import Mesh, emulated, hosts, own_device, world_size
from shardwright.errors import UserError
from shardwright.measure import device, network
from shardwright.measure.timing import PASSES, Clock
from shardwright.spec.cluster import Cluster, Collective, Device, Price

T = TypeVar("T")
WINDOW_SECONDS = 0.08


def measure(name: str, folder: Path, say: Callable[[str], None], *, window_seconds: float = 0.0) -> Cluster:
    """By every rank at once; the times are the same on all. `folder` is where the disk is tried."""
    with joined() as mesh:
        return _measured(mesh, name, folder, say, window_seconds or WINDOW_SECONDS)


@contextmanager
def joined() -> Iterator[Mesh]:
    """Hosts x local ranks, as the launch says; a flat mesh where hosts have different numbers of ranks."""
    place = own_device()
    flat = Mesh([("host", world_size())] if world_size() > 1 else (), device=place)
    try:
        mine = torch.tensor([hosts()], dtype=torch.int64, device=place)
        told = collective.all_gather(mine, [1] * flat.size, flat.group()).wait()
        num_hosts, local = told[0].tolist()
        even = bool((told == told[0]).all()) and num_hosts * local == flat.size
        if not even or local == 1:
            yield flat
            return
        mesh = Mesh([(axis, num) for axis, num in (("host", num_hosts), ("local", local)) if num > 1], device=place)
        yield mesh
        mesh.close()
    finally:
        flat.close()


def _measured(mesh: Mesh, name: str, folder: Path, say: Callable[[str], None], window_seconds: float) -> Cluster:
    clock = Clock(mesh.group(), mesh.device, window_seconds)
    own, links = device.Work(mesh.device), network.Work(mesh)
    for at in range(PASSES):
        say(f"the device, pass {at + 1} of {PASSES}")
        own.run(clock)
        links.run(clock, lambda what, at=at: say(f"{what}, pass {at + 1} of {PASSES}"))
    say("memory and disk")
    local, place = dict(mesh.axes).get("local", 1), mesh.device
    tiers, prices = [device.memory(clock, place, local)], [*own.prices()]
    if place.type == "cuda":
        prices += device.host_copies(clock, place)
        tiers.append(device.memory(clock, torch.device("cpu"), local))
    tiers.append(device.disk(clock, folder, local))
    of_device = Device(device.name_of(place), "cuda" if place.type == "cuda" else "cpu", tuple(tiers), tuple(prices))
    source = "emulated" if emulated() else "measured"
    beside = tuple(network.beside(mesh, clock, say))
    return Cluster(1, name, source, of_device, tuple(links.levels()), tuple(links.collectives()), beside)


def merged(old: Cluster, new: Cluster) -> Cluster:
    """The new measurements, and of the old ones what was not measured again."""
    if (old.device.name, old.device.kind) != (new.device.name, new.device.kind):
        raise UserError(
            f'the file holds measurements of "{old.device.name}", this is "{new.device.name}"; choose another file'
        )
    levels = new.levels or old.levels
    nums = {level.name: level.num for level in levels}

    def holds(one: Collective) -> bool:
        return all(nums.get(name) == num for name, num in zip(one.levels, one.nums, strict=True))

    def price(one: Price) -> tuple[str, str]:
        return one.op, one.dtype

    return replace(
        new,
        device=replace(new.device, prices=_union(old.device.prices, new.device.prices, price)),
        levels=levels,
        collectives=_union(filter(holds, old.collectives), new.collectives, lambda one: (one.op, one.levels)),
        beside=new.beside or tuple(one for one in old.beside if set(one.levels) <= set(nums)),
    )


def _union(old: Iterable[T], new: Iterable[T], key: Callable[[T], object]) -> tuple[T, ...]:
    return tuple({key(one): one for one in (*old, *new)}.values())
