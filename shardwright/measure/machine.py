"""Measure the machines this job runs on, as a Cluster; works for any launch with any number of ranks."""

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
from shardwright.measure import device, disk, layer_probes, network
from shardwright.measure.timing import Clock
from shardwright.spec.cluster import HOST_LEVEL, Beside, Cluster, Device, Price, Sample

WINDOW_SECONDS = 0.12


def measure_cluster(
    name: str,
    folder: Path,
    report_progress: Callable[[str], None],
    *,
    window_seconds: float = 0.0,
    with_layers: bool = False,
) -> Cluster:
    """Measure on all ranks at once; returns the same Cluster on all ranks.

    The disk is measured by a temporary file in `folder`. `with_layers`: also products and attention of transformers.
    """
    retain_freed_memory()  # as a training job does
    use_library(library_in_use() or preferred_library())
    with measurement_mesh() as mesh:
        clock = Clock(mesh.group(), mesh.device, window_seconds or WINDOW_SECONDS)
        return _measure(mesh, name, folder, report_progress, clock, with_layers)


@contextmanager
def measurement_mesh() -> Iterator[Mesh]:
    """A (host, local) mesh as launched; a flat mesh where hosts have different numbers of ranks."""
    own_device = select_device()
    flat = Mesh([(HOST_LEVEL, world_size())] if world_size() > 1 else (), device=own_device)
    try:
        topology = torch.tensor([host_topology()], dtype=torch.int64, device=own_device)
        topologies = collective.all_gather(topology, [1] * flat.size, flat.group()).wait()
        num_hosts, num_local = topologies[0].tolist()
        is_uniform = bool((topologies == topologies[0]).all()) and num_hosts * num_local == flat.size
        if not is_uniform or num_local == 1:
            yield flat
            return
        mesh = Mesh(
            [(axis, n) for axis, n in ((HOST_LEVEL, num_hosts), ("local", num_local)) if n > 1], device=own_device
        )
        yield mesh
        mesh.close()
    finally:
        flat.close()


def _measure(
    mesh: Mesh, name: str, folder: Path, report: Callable[[str], None], clock: Clock, with_layers: bool
) -> Cluster:
    if not all(clock.all_gather(float(os.access(folder, os.W_OK)))):
        raise UserError(f"{folder}: not a folder that every rank may write to; its disk is measured there")
    report("products, random rows, codecs")
    prices = device.measure_prices(clock, mesh.device)
    if with_layers:
        report("products and attention of transformers")
        prices = merge_prices(prices, layer_probes.measure_layer_prices(clock, mesh.device))
    if mesh.size > 1:
        report(f"messages: to {len(mesh.near)} of {mesh.size - 1} other ranks through memory")
    links = tuple(network.measure_collectives(mesh, clock, report))
    report("memory and disk")
    num_local, own_device = dict(mesh.axes).get("local", 1), mesh.device
    tiers = [device.measure_memory(clock, own_device, num_local)]
    if own_device.type == "cuda":
        prices += device.measure_host_copies(clock, own_device)
        tiers.append(device.measure_memory(clock, torch.device("cpu"), num_local))
    disk_tier, page_prices = disk.measure_disk(clock, folder, num_local)
    tiers.append(disk_tier)
    prices += page_prices
    device_spec = Device(
        device.device_name(own_device), "cuda" if own_device.type == "cuda" else "cpu", tuple(tiers), tuple(prices)
    )
    source = "emulated" if is_emulated() else "measured"
    overlaps = tuple(network.measure_overlap(mesh, clock, report))
    return Cluster(
        version=1,
        name=name,
        source=source,
        device=device_spec,
        levels=tuple(network.fit_levels(mesh.axes[::-1], links)),
        collectives=links,
        beside=overlaps,
        stolen_share=round(clock.stolen_share, 4),
    )


def merge_clusters(old: Cluster, new: Cluster) -> Cluster:
    """Merge two measurements of the same hardware; prices and links are fitted to the medians of both."""
    if _hardware(old) != _hardware(new):
        raise UserError(f"the file describes {_hardware(old)}, this is {_hardware(new)}; choose another file")
    links = {(entry.op, entry.levels): entry for entry in old.collectives}
    for entry in new.collectives:
        before = links.get((entry.op, entry.levels))
        samples = _merge_samples(before.samples if before else (), entry.samples)
        links[entry.op, entry.levels] = network.fit_collective(entry.op, entry.levels, entry.nums, samples)
    overlaps = {(item.op, item.levels, item.bytes_): item for item in old.beside}
    for item in new.beside:
        overlaps[item.op, item.levels, item.bytes_] = _mean(overlaps.get((item.op, item.levels, item.bytes_)), item)
    return replace(
        new,
        device=replace(new.device, prices=tuple(merge_prices(old.device.prices, new.device.prices))),
        levels=tuple(network.fit_levels([(level.name, level.num) for level in new.levels], [*links.values()])),
        collectives=tuple(links.values()),
        beside=tuple(overlaps.values()),
    )


def merge_prices(old: Sequence[Price], new: Sequence[Price]) -> list[Price]:
    """Old prices, with those that were measured again fitted to the samples of both."""
    prices = {(entry.op, entry.dtype): entry for entry in old}
    for entry in new:
        before = prices.get((entry.op, entry.dtype))
        samples = _merge_samples(before.samples if before else (), entry.samples)
        prices[entry.op, entry.dtype] = device.fit_price(entry.op, entry.dtype, samples)
    return list(prices.values())


def _hardware(cluster: Cluster) -> str:
    shape = " x ".join(f"{level.num} {level.name}" for level in cluster.levels) or "one rank"
    return f'{cluster.source} hardware "{cluster.device.name}", {shape}'


def _merge_samples(old: Sequence[Sample], new: Sequence[Sample]) -> list[Sample]:
    times: dict[tuple[int, ...], tuple[float, ...]] = {}
    for sample in (*old, *new):
        times[sample.sizes] = times.get(sample.sizes, ()) + sample.times
    return [Sample(sizes, times[sizes]) for sizes in sorted(times)]


def _mean(old: Beside | None, new: Beside) -> Beside:
    """Mean weighted by the number of measurements of each."""
    if old is None:
        return new
    num = old.num + new.num
    if bool(old.matmul_end_seconds) != bool(new.matmul_end_seconds):
        return new  # an old file without ends: its seconds alone would not fit the new ends
    names = (
        "collective_seconds",
        "matmul_seconds",
        "together_seconds",
        "collective_end_seconds",
        "matmul_end_seconds",
    )
    means = {name: (old.num * getattr(old, name) + new.num * getattr(new, name)) / num for name in names}
    return replace(new, num=num, **means)
