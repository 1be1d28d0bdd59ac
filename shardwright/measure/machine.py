"""Look at the machines this job runs on: a Cluster of what was found, by any launch of any number of ranks."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from shardwright.comm import collective
from shardwright.comm.mesh import Mesh, host_topology, is_emulated, select_device, world_size
from shardwright.errors import UserError
from shardwright.kernels.matmul import library_in_use, preferred_library, use_library
from shardwright.kernels.native import retain_freed_memory
from shardwright.measure import device, network
from shardwright.measure.timing import Clock
from shardwright.spec.cluster import Beside, Cluster, Device, Sample

WINDOW_SECONDS = 0.12


def measure_cluster(
    name: str, folder: Path, report_progress: Callable[[str], None], *, window_seconds: float = 0.0
) -> Cluster:
    """By every rank at once; the times are the same on all. `folder` is where the disk is tried."""
    retain_freed_memory()  # as a job does
    use_library(library_in_use() or preferred_library())
    with measurement_mesh() as mesh:
        return _measured(mesh, name, folder, report_progress, window_seconds or WINDOW_SECONDS)


@contextmanager
def measurement_mesh() -> Iterator[Mesh]:
    """Hosts x local ranks, as the launch says; a flat mesh where hosts have different numbers of ranks."""
    place = select_device()
    flat = Mesh([("host", world_size())] if world_size() > 1 else (), device=place)
    try:
        mine = torch.tensor([host_topology()], dtype=torch.int64, device=place)
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
    if not all(clock.all_gather(float(os.access(folder, os.W_OK)))):
        raise UserError(f"{folder}: not a folder that every rank may write to, where its disk would be tried")
    say("products, random rows, codecs")
    prices = device.measure_prices(clock, mesh.device)
    if mesh.size > 1:
        say(f"messages: to {len(mesh.near)} of {mesh.size - 1} other ranks through memory")
    links = tuple(network.measure_collectives(mesh, clock, say))
    say("memory and disk")
    local, place = dict(mesh.axes).get("local", 1), mesh.device
    tiers = [device.measure_memory(clock, place, local)]
    if place.type == "cuda":
        prices += device.measure_host_copies(clock, place)
        tiers.append(device.measure_memory(clock, torch.device("cpu"), local))
    tiers.append(device.measure_disk(clock, folder, local))
    of_device = Device(
        device.device_name(place), "cuda" if place.type == "cuda" else "cpu", tuple(tiers), tuple(prices)
    )
    source = "emulated" if is_emulated() else "measured"
    beside = tuple(network.measure_overlap(mesh, clock, say))
    return Cluster(
        version=1,
        name=name,
        source=source,
        device=of_device,
        levels=tuple(network.fit_levels(mesh.axes[::-1], links)),
        collectives=links,
        beside=beside,
        stolen_share=round(clock.stolen_share, 4),
    )


def merge_clusters(old: Cluster, new: Cluster) -> Cluster:
    """What either measured; lines and links are fitted anew, to the medians of what both did."""
    if _about(old) != _about(new):
        raise UserError(f"the file holds what was {_about(old)}, this is {_about(new)}; choose another file")
    prices = {(one.op, one.dtype): one for one in old.device.prices}
    for one in new.device.prices:
        before = prices.get((one.op, one.dtype))
        samples = _pooled(before.samples if before else (), one.samples)
        prices[one.op, one.dtype] = device.fit_price(one.op, one.dtype, samples)
    links = {(one.op, one.levels): one for one in old.collectives}
    for one in new.collectives:
        before = links.get((one.op, one.levels))
        samples = _pooled(before.samples if before else (), one.samples)
        links[one.op, one.levels] = network.fit_collective(one.op, one.levels, one.nums, samples)
    beside = {(one.op, one.levels, one.bytes_): one for one in old.beside}
    for one in new.beside:
        beside[one.op, one.levels, one.bytes_] = _mean(beside.get((one.op, one.levels, one.bytes_)), one)
    return replace(
        new,
        device=replace(new.device, prices=tuple(prices.values())),
        levels=tuple(network.fit_levels([(level.name, level.num) for level in new.levels], [*links.values()])),
        collectives=tuple(links.values()),
        beside=tuple(beside.values()),
    )


def _about(cluster: Cluster) -> str:
    shape = " x ".join(f"{level.num} {level.name}" for level in cluster.levels) or "one rank"
    return f'{cluster.source} of "{cluster.device.name}", {shape}'


def _pooled(old: Sequence[Sample], new: Sequence[Sample]) -> list[Sample]:
    times: dict[tuple[int, ...], tuple[float, ...]] = {}
    for one in (*old, *new):
        times[one.sizes] = times.get(one.sizes, ()) + one.times
    return [Sample(sizes, times[sizes]) for sizes in sorted(times)]


def _mean(old: Beside | None, new: Beside) -> Beside:
    """Weighed by how often each was measured."""
    if old is None:
        return new
    num = old.num + new.num
    names = ("collective_seconds", "matmul_seconds", "together_seconds")
    means = {name: (old.num * getattr(old, name) + new.num * getattr(new, name)) / num for name in names}
    return replace(new, num=num, **means)
