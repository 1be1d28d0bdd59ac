"""Load clusters by name: built-in presets, or files that `shardwright measure` wrote."""

from dataclasses import replace
from pathlib import Path

from shardwright.errors import UserError, did_you_mean
from shardwright.spec import files
from shardwright.spec.cluster import Cluster

FOLDER = Path(__file__).parents[1] / "clusters"


def cluster_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def unmeasured_cluster(num_hosts: int, ranks_per_host: int, memory_bytes: int, disk_bytes: int = 0) -> Cluster:
    """A default cluster for machines that were not measured; `memory_bytes`, `disk_bytes`: of each rank; 0: no disk.

    It has the rates of the preset "two-cores"; between hosts, a tenth of the rate between processes.
    """
    cluster = load_cluster("two-cores")
    sizes = zip(cluster.device.tiers, (memory_bytes, disk_bytes), strict=True)
    tiers = tuple(replace(tier, bytes_=size) for tier, size in sizes if size)
    cluster = replace(cluster, name="not measured", source="scaled", device=replace(cluster.device, tiers=tiers))
    if num_hosts * ranks_per_host == 1:
        return replace(cluster, levels=(), collectives=(), beside=())
    inner = replace(cluster.levels[0], num=ranks_per_host)
    outer = replace(
        inner, name="host", num=num_hosts, bytes_per_second=inner.bytes_per_second / 10, both_bytes_per_second=None
    )
    return replace(cluster, levels=(inner, outer) if num_hosts > 1 else (inner,))


def limit_memory(cluster: Cluster, bytes_: int) -> Cluster:
    """The cluster whose ranks use at most these bytes of their fastest memory."""
    fast, *slower = cluster.device.tiers
    tiers = (replace(fast, bytes_=min(fast.bytes_, bytes_)), *slower)
    return replace(cluster, device=replace(cluster.device, tiers=tiers))


def load_cluster(name: str | Path) -> Cluster:
    """Read and verify a cluster: a preset's name, or a file that `shardwright measure` wrote."""
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
        if not path.exists():
            raise UserError(f'no cluster "{name}"{did_you_mean(str(name), cluster_names())}; or give a .toml file')
    cluster = files.read(Cluster, path)
    cluster.verify()
    return cluster
