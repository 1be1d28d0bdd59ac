"""Clusters by name: published ones that come with the package, and files of one's own."""

from dataclasses import replace
from pathlib import Path

from shardwright.errors import UserError, nearest
from shardwright.spec import files
from shardwright.spec.cluster import Cluster

FOLDER = Path(__file__).parents[1] / "clusters"


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def unmeasured(hosts: int, local: int, bytes_: int) -> Cluster:
    """What is taken for a job whose machines were not measured but for their memory, `bytes_` of each rank: the rates
    of a published pair of cores, and between hosts a tenth of what goes between processes."""
    known = cluster("two-cores")
    memory = replace(known.device.tiers[0], bytes_=bytes_)
    known = replace(known, device=replace(known.device, tiers=(memory,)))
    inside = replace(known.levels[0], num=local)
    outside = replace(
        inside, name="host", num=hosts, bytes_per_second=inside.bytes_per_second / 10, both_bytes_per_second=None
    )
    return replace(known, name="not measured", source="scaled", levels=(inside, outside) if hosts > 1 else (inside,))


def cluster(name: str | Path) -> Cluster:
    """A preset's name, or a file that `shardwright measure` wrote."""
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
        if not path.exists():
            raise UserError(f'no cluster "{name}"{nearest(str(name), names())}; or give a .toml file')
    found = files.read(Cluster, path)
    found.verify()
    return found
