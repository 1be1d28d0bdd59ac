"""Clusters by name: published ones that come with the package, and files of one's own."""

from dataclasses import replace
from pathlib import Path

from shardwright.errors import UserError, did_you_mean
from shardwright.spec import files
from shardwright.spec.cluster import Cluster

FOLDER = Path(__file__).parents[1] / "clusters"


def cluster_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def unmeasured_cluster(num_hosts: int, ranks_per_host: int, memory_bytes: int) -> Cluster:
    """What is taken for a job whose machines were not measured but for their memory, `bytes_` of each rank: the rates
    of a published pair of cores, and between hosts a tenth of what goes between processes."""
    known = load_cluster("two-cores")
    memory = replace(known.device.tiers[0], bytes_=memory_bytes)
    known = replace(known, device=replace(known.device, tiers=(memory,)))
    inside = replace(known.levels[0], num=ranks_per_host)
    outside = replace(
        inside, name="host", num=num_hosts, bytes_per_second=inside.bytes_per_second / 10, both_bytes_per_second=None
    )
    return replace(
        known, name="not measured", source="scaled", levels=(inside, outside) if num_hosts > 1 else (inside,)
    )


def load_cluster(name: str | Path) -> Cluster:
    """A preset's name, or a file that `shardwright measure` wrote."""
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
        if not path.exists():
            raise UserError(f'no cluster "{name}"{did_you_mean(str(name), cluster_names())}; or give a .toml file')
    found = files.read(Cluster, path)
    found.verify()
    return found
