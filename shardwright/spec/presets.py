"""Clusters by name: published ones that come with the package, and files of one's own."""

from pathlib import Path

from shardwright.errors import UserError, nearest
from shardwright.spec import files
from shardwright.spec.cluster import Cluster

FOLDER = Path(__file__).parents[1] / "clusters"


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


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
