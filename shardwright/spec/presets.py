"""Load clusters by name: built-in presets, or files that `shardwright measure` wrote."""

from dataclasses import replace
from pathlib import Path

from shardwright.errors import UserError, did_you_mean
from shardwright.spec import files
from shardwright.spec.cluster import Cluster

FOLDER = Path(__file__).parents[1] / "clusters"


def cluster_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def unmeasured_cluster(num_hosts: int, ranks_per_host: int, memory_bytes: int) -> Cluster:
    """A default cluster for machines that were not measured; `memory_bytes` is the memory of each rank.

    It has the rates of the preset "two-cores"; between hosts, a tenth of the rate between processes.
    """
    cluster = load_cluster("two-cores")
    memory = replace(cluster.device.tiers[0], bytes_=memory_bytes)
    cluster = replace(cluster, device=replace(cluster.device, tiers=(memory,)))
    inner = replace(cluster.levels[0], num=ranks_per_host)
    outer = replace(
        inner, name="host", num=num_hosts, bytes_per_second=inner.bytes_per_second / 10, both_bytes_per_second=None
    )
    return replace(cluster, name="not measured", source="scaled", levels=(inner, outer) if num_hosts > 1 else (inner,))


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
