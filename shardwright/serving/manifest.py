"""The manifest of an exported model, a folder that needs neither the model's code nor its data."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.checkpoint.manifest import StoredArray
from shardwright.errors import UserError
from shardwright.spec import files
from shardwright.spec.workload import MAX_GROWING_ROWS, Feature, Table

VERSION = 1
MANIFEST_FILE, TABLES_FILE, PROGRAM_FILE = "served.json", "tables.safetensors", "dense.pt2"
TRANSFORMS_DIRECTORY = "transforms"
ITEMS_FILE = "items.safetensors"  # of a model that retrieves: the vectors of all items
SCALES_SUFFIX = ".scales"  # after a table's name: the array of scales of its int8 rows
IDS_SUFFIX = ".ids"  # after the name of a table that grows: the array of the ids of its rows
PROBABILITY, LOGIT = "probability", "logit"
VECTORS = "vectors"  # in place of a score: the vectors of user and item, (2, D)


@dataclass(frozen=True)
class ExportManifest:
    """Contents of an export's served.json."""

    version: int
    step: int  # of the checkpoint
    line: str  # lineage id of the checkpoint, as in `ModelVersion`
    time: float  # when the checkpoint was taken, in seconds since the epoch; 0: unknown
    origin: str  # path of the checkpoint
    scores: str  # PROBABILITY, LOGIT or VECTORS
    features: tuple[str, ...]  # of a batch, in order
    num_dense: int  # number of numeric features
    numbers: str  # dtype of numeric features
    tables: tuple[Table, ...]
    bags: tuple[Feature, ...]
    weighted: bool | None
    stored: str  # dtype of the tables, float16 or int8; empty: as trained
    errors: dict[str, float]  # largest rounding error of a weight, by table
    names: dict[str, str]  # name in checkpoints and publications, by table
    arrays: dict[str, StoredArray]  # of TABLES_FILE, by table, or by table with SCALES_SUFFIX
    transforms: str  # digest of the transforms; empty: requests have ids
    digests: dict[str, str]  # SHA-256 of all other files, by path
    initial: dict[str, tuple[int, float]] = field(default_factory=dict)  # by table that grows: seed and largest value
    tasks: tuple[str, ...] = ()  # names of the scores of a sample, in order; empty: one score without a name

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables and scales."""
        return sum(a.shape[0] * a.shape[1] * int(a.dtype.strip("bfloatin")) // 8 for a in self.arrays.values())


def logical_rows(table: Table) -> int:
    """Rows of a table's tensor in checkpoints and publications."""
    return table.rows if table.growth is None else MAX_GROWING_ROWS


def removed_name(weight_name: str) -> str:
    """The name, in checkpoints and publications, of the ids whose rows have ended."""
    return f"{weight_name.removesuffix('weight')}removed"


def read(folder: Path) -> ExportManifest:
    """Read the manifest of an exported model, and verify its files except the tables."""
    if not (folder / MANIFEST_FILE).is_file():
        raise UserError(f"{folder}: no exported model; create it with `shardwright export RUN {folder}`")
    manifest = files.read(ExportManifest, folder / MANIFEST_FILE)
    if manifest.version != VERSION:
        raise UserError(f"{folder}: version {manifest.version}; this Shardwright reads version {VERSION}: export again")
    for name, stored in manifest.arrays.items():
        if stored.file != TABLES_FILE:
            raise UserError(f'{folder / MANIFEST_FILE}: table "{name}" is in "{stored.file}"; wanted {TABLES_FILE}')
    for name, digest in manifest.digests.items():
        if not re.fullmatch(
            rf"{re.escape(PROGRAM_FILE)}|{re.escape(ITEMS_FILE)}|{TRANSFORMS_DIRECTORY}/\w+\.\w+", name
        ):
            raise UserError(
                f'{folder / MANIFEST_FILE}: names file "{name}"; wanted {PROGRAM_FILE}, {ITEMS_FILE} or one in '
                f"{TRANSFORMS_DIRECTORY}/"
            )
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: missing; export the model again")
        if file_digest(folder / name) != digest:
            raise UserError(f"{folder / name}: differs from what was written; export the model again")
    return manifest


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
