"""CPU quotas of ranks, by cgroups (v1 or v2); the cgroups also list the processes of a lab."""

import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from shardwright.errors import UserError

# A rank runs at full speed until its quota of a period is used up, and then its threads wait, also those that send and
# receive. So periods are short; but in one of 2 ms, less than a tick of the kernel, a quota has no effect (measured).
PERIOD_MICROSECONDS, MIN_QUOTA_MICROSECONDS = 5_000, 1_000  # the kernel refuses smaller quotas
CGROUP_ROOT = Path("/sys/fs/cgroup")


def group_path(lab: str, rank: int) -> Path:
    """The directory of a rank's cgroup."""
    return _lab_path(lab) / f"r{rank}"


def create_groups(lab: str, cores: list[float]) -> None:
    """Create a cgroup for each rank with a quota of `cores` (0: none), unless no rank has a quota."""
    if not any(cores):
        return
    try:
        _lab_path(lab).mkdir(parents=True, exist_ok=True)
        if not _is_cgroup_v1():
            for parent in (CGROUP_ROOT, CGROUP_ROOT / "shardwright", _lab_path(lab)):
                (parent / "cgroup.subtree_control").write_text("+cpu")
        for rank, rank_cores in enumerate(cores):
            group_path(lab, rank).mkdir(exist_ok=True)
            _set_quota(group_path(lab, rank), rank_cores)
    except OSError as error:
        remove_groups(lab)
        raise UserError(f"CPU quotas need writable cgroups: {error}; run as root, or without --cpu") from error


def remove_groups(lab: str) -> None:
    """Kill all processes in a lab's cgroups and remove the cgroups."""
    if not _lab_path(lab).exists():
        return
    groups = [_lab_path(lab), *(path for path in _lab_path(lab).iterdir() if path.is_dir())]
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
        _lab_path(lab).parent.rmdir()


def labs_with_groups() -> list[str]:
    """The names of labs that have cgroups."""
    root = _root_path()
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.exists() else []


def _set_quota(path: Path, cores: float) -> None:
    period = max(PERIOD_MICROSECONDS, math.ceil(MIN_QUOTA_MICROSECONDS / cores)) if cores else PERIOD_MICROSECONDS
    quota = int(cores * period) if cores else -1
    if _is_cgroup_v1():
        (path / "cpu.cfs_period_us").write_text(str(period))
        (path / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (path / "cpu.max").write_text(f"{quota if cores else 'max'} {period}")


def _is_cgroup_v1() -> bool:
    return not (CGROUP_ROOT / "cgroup.controllers").exists()


def _root_path() -> Path:
    return (CGROUP_ROOT / "cpu" if _is_cgroup_v1() else CGROUP_ROOT) / "shardwright"


def _lab_path(lab: str) -> Path:
    return _root_path() / lab
