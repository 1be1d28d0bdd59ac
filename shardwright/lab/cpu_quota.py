"""Cpu quotas of ranks, by control groups of either version; the groups also say which processes are a lab's."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from shardwright.errors import UserError

PERIOD_MICROSECONDS = 20_000  # longer ones let a rank run through a whole short step at full speed
CGROUP_ROOT = Path("/sys/fs/cgroup")


def group_path(lab: str, rank: int) -> Path:
    return _of(lab) / f"r{rank}"


def create_groups(lab: str, cores: list[float]) -> None:
    """A group for each rank, limited to so many cores (0: not limited)."""
    if not any(cores):
        return
    try:
        _of(lab).mkdir(parents=True, exist_ok=True)
        if not _first_version():
            for parent in (CGROUP_ROOT, CGROUP_ROOT / "shardwright", _of(lab)):
                (parent / "cgroup.subtree_control").write_text("+cpu")
        for rank, share in enumerate(cores):
            group_path(lab, rank).mkdir(exist_ok=True)
            _limit(group_path(lab, rank), share)
    except OSError as error:
        remove_groups(lab)
        raise UserError(f"cpu quotas need control groups that may be written: {error}; go without --cpu") from error


def remove_groups(lab: str) -> None:
    """End what runs in the groups, and remove them."""
    if not _of(lab).exists():
        return
    groups = [_of(lab), *(path for path in _of(lab).iterdir() if path.is_dir())]
    for _ in range(50):
        pids = [int(pid) for path in groups for pid in (path / "cgroup.procs").read_text().split()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.1)
    for path in reversed(groups):
        path.rmdir()
    with suppress(OSError):
        _of(lab).parent.rmdir()


def labs_with_groups() -> list[str]:
    """The labs that have groups."""
    base = _base()
    return sorted(path.name for path in base.iterdir() if path.is_dir()) if base.exists() else []


def _limit(path: Path, cores: float) -> None:
    quota = int(cores * PERIOD_MICROSECONDS) if cores else -1
    if _first_version():
        (path / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        (path / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (path / "cpu.max").write_text(f"{quota if cores else 'max'} {PERIOD_MICROSECONDS}")


def _first_version() -> bool:
    return not (CGROUP_ROOT / "cgroup.controllers").exists()


def _base() -> Path:
    return (CGROUP_ROOT / "cpu" if _first_version() else CGROUP_ROOT) / "shardwright"


def _of(lab: str) -> Path:
    return _base() / lab
