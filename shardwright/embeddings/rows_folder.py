"""The folder of a process for rows on disk, removed when the process ends, or later if it was killed."""

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

PREFIX, LOCK = "shardwright-rows-", "lock"


class RowsFolder:
    """Below the folder for temporary files (TMPDIR). A lock shows that its process lives."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        made = Path(tempfile.mkdtemp(prefix="shardwright-new-"))
        self._lock = os.open(made / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name.replace("new", "rows", 1)))  # now others may look at its lock
        self._remove = weakref.finalize(self, _remove_folder, self.path, self._lock)

    def make_subfolder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="table-", dir=self.path))


def _remove_folder(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:  # another user's, or just being made or removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            continue
        _remove_folder(folder, lock)
