"""The parts of a file of scores, in a directory beside it until all are complete.

A part is a file of its own with the scores of consecutive rows, complete or absent. Its rows depend only on the input,
so any process may write it, and a later call continues with the parts that are missing.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from shardwright.checkpoint.step_directories import fsync_path
from shardwright.errors import UserError
from shardwright.spec import files

SUFFIXES = (".parquet", ".csv")
JOB_FILE, TOTAL_FILE = "job.json", "total.json"
COPY_BYTES = 16 << 20


class ScoreParts:
    """The directory of the parts of one output file."""

    def __init__(self, output: Path) -> None:
        if output.suffix not in SUFFIXES:
            raise UserError(f"out={output}: the suffix says the format; allowed: {', '.join(SUFFIXES)}")
        self.output = output
        self.directory = output.with_name(f".{output.name}.parts")

    def open(self, job: Mapping[str, Any]) -> None:
        """Make the directory, and drop the parts of another job. `job`: JSON values that all scores depend on."""
        if self.output.exists():
            raise UserError(f"out={self.output}: exists; remove it, or choose another file")
        try:
            self.directory.mkdir(exist_ok=True)
            self._lock = os.open(self.directory / ".lock", os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise UserError(f"{self.output.parent}: cannot be written ({error.strerror}); choose another out") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"out={self.output}: another process writes it; wait for it or choose another out"
            ) from None
        text, path = json.dumps(job, indent=1, sort_keys=True), self.directory / JOB_FILE
        if not path.is_file() or path.read_text() != text:
            for old in self.directory.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
                elif old.name != ".lock":
                    old.unlink()
            files.write_text(text, path)

    def path(self, number: int) -> Path:
        return self.directory / f"part-{number:06d}{self.output.suffix}"

    def is_complete(self, number: int) -> bool:
        return self.path(number).is_file()

    @property
    def num_complete(self) -> int:
        return len(list(self.directory.glob(f"part-*{self.output.suffix}")))

    def write(self, number: int, table: pa.Table) -> None:
        """Write a part, under its final name once it is complete."""
        final = self.path(number)
        draft = final.with_name(f".{final.name}.draft")
        if self.output.suffix == ".parquet":
            pq.write_table(table, draft)
        else:
            options = pcsv.WriteOptions(include_header=number == 0, quoting_style="needed")
            pcsv.write_csv(table, draft, options)
        fsync_path(draft)
        draft.rename(final)

    def write_total(self, num_parts: int, num_rows: int) -> None:
        """Record how many parts and rows the input has, once it has been read to its end."""
        files.write_text(json.dumps({"parts": num_parts, "rows": num_rows}), self.directory / TOTAL_FILE)

    def read_total(self) -> dict[str, int] | None:
        """How many parts and rows there are; None if it is not known yet."""
        path = self.directory / TOTAL_FILE
        return json.loads(path.read_text()) if path.is_file() else None

    @property
    def are_all_complete(self) -> bool:
        total = self.read_total()
        return total is not None and all(map(self.is_complete, range(total["parts"])))

    def assemble(self) -> int:
        """Write the output from all parts and remove them; returns the number of rows."""
        total = self.read_total()
        assert total is not None
        paths, draft = [self.path(number) for number in range(total["parts"])], self.directory / ".output"
        if self.output.suffix == ".parquet":
            with pq.ParquetWriter(draft, pq.read_schema(paths[0])) as writer:
                for path in paths:
                    writer.write_table(pq.read_table(path))
        else:
            with draft.open("wb") as output:
                for path in paths:
                    with path.open("rb") as part:
                        shutil.copyfileobj(part, output, COPY_BYTES)
        fsync_path(draft)
        draft.rename(self.output)
        fsync_path(self.output.parent)
        self.close()
        shutil.rmtree(self.directory)
        return total["rows"]

    def close(self) -> None:
        """Let other processes write the output."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    _lock: int | None = None
