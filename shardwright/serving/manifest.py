"""What an exported model is: a folder of files that needs neither the model's code nor its data."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint.manifest import StoredArray
from shardwright.errors import UserError
from shardwright.spec import files
from shardwright.spec.workload import Feature, Table

VERSION = 1
MANIFEST_FILE, TABLES_FILE, PROGRAM_FILE = "served.json", "tables.safetensors", "dense.pt2"
TRANSFORMS_DIRECTORY = "transforms"
SCALES_SUFFIX = ".scales"  # behind a table's name: of its rows in int8
PROBABILITY, LOGIT = "probability", "logit"


@dataclass(frozen=True)
class ExportManifest:
    """One state of a model."""

    version: int
    step: int  # of the checkpoint it was made from
    line: str  # of the run that wrote that, and when
    time: float
    origin: str
    scores: str  # PROBABILITY or LOGIT
    features: tuple[str, ...]  # of a batch, in order
    num_dense: int
    numbers: str  # their dtype
    tables: tuple[Table, ...]
    bags: tuple[Feature, ...]
    weighted: bool | None
    stored: str  # float16 or int8; empty: each table as it was trained
    errors: dict[str, float]  # of each table, the largest that this made to a weight
    names: dict[str, str]  # what each table is called in checkpoints and publications
    arrays: dict[str, StoredArray]  # of TABLES
    transforms: str  # the digest of what values become; empty: it is asked about ids
    digests: dict[str, str]  # of the other files

    @property
    def table_bytes(self) -> int:
        """Of the tables."""
        return sum(one.shape[0] * one.shape[1] * int(one.dtype.strip("bfloatin")) // 8 for one in self.arrays.values())


def read(folder: Path) -> ExportManifest:
    if not (folder / MANIFEST_FILE).is_file():
        raise UserError(f"{folder}: no exported model; make one with `shardwright export RUN {folder}`")
    found = files.read(ExportManifest, folder / MANIFEST_FILE)
    if found.version != VERSION:
        raise UserError(f"{folder}: version {found.version}; this Shardwright reads version {VERSION}: export it anew")
    for name, stored in found.arrays.items():
        if stored.file != TABLES_FILE:
            raise UserError(f'{folder / MANIFEST_FILE}: table "{name}" lies in "{stored.file}"; wanted {TABLES_FILE}')
    for name, digest in found.digests.items():
        if not re.fullmatch(rf"{re.escape(PROGRAM_FILE)}|{TRANSFORMS_DIRECTORY}/\w+\.\w+", name):
            raise UserError(
                f'{folder / MANIFEST_FILE}: names file "{name}"; wanted {PROGRAM_FILE} or one in '
                f"{TRANSFORMS_DIRECTORY}/"
            )
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: missing; export the model anew")
        if file_digest(folder / name) != digest:
            raise UserError(f"{folder / name}: differs from what was written; export the model anew")
    return found


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
