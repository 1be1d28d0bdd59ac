"""The processors of this host: threads of a rank, and processor time that a run loses to others."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwright.comm.mesh import lab_cores

STAT, CGROUPS, OWN_CGROUP = Path("/proc/stat"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
STEAL_COLUMN = 8  # of a line of /proc/stat
UNLIMITED = ("max", "-1")


@dataclass(frozen=True, slots=True)
class Threads:
    """Number of threads a rank computes with; str() gives the number and its reason."""

    count: int
    usable_cores: float  # the smaller of affinity and cgroup quota of this process
    why: str
    is_set: bool  # whether the user set it in OMP_NUM_THREADS

    def __str__(self) -> str:
        return self.why


def choose_threads(workers: int, local_ranks: int, omp_num_threads: str) -> Threads:
    """Choose a rank's number of threads: its share of the usable cores minus its loader workers.

    The result is at least one. `workers` are the loader workers of each rank, `local_ranks` the ranks of this host.
    `omp_num_threads` is OMP_NUM_THREADS as the user set it; a valid number there is used unchanged.
    """
    affinity, quota = len(os.sched_getaffinity(0)), quota_cores()
    usable = min(float(affinity), quota or float(affinity))
    count = max(1, int(usable / local_ranks) - workers)
    user_count = omp_num_threads.partition(",")[0].strip()  # one number, or one for each nesting level
    is_set = user_count.isdigit() and int(user_count) > 0
    if is_set:
        count = int(user_count)
    uses = [f"{count} for computing", f"{workers} loader worker{'s' * (workers != 1)}"]
    per_rank = f" in each of {local_ranks} ranks" if local_ranks > 1 else ""
    split = f"{' and '.join(uses if workers else uses[:1])}{per_rank}"
    limit = f", cgroup quota {quota:.3g}" if quota else ""
    why = f"threads: {split}, on {affinity} core{'s' * (affinity != 1)}{limit}"
    if is_set:
        why += f"; OMP_NUM_THREADS={omp_num_threads} is set"
    if local_ranks * (count + workers) > usable:
        why += "; too few cores for all to run at once"
    return Threads(count, usable, why, is_set)


def rank_cores(local_ranks: int) -> float:
    """Cores that each of `local_ranks` ranks of this host can use; less than one under a small quota."""
    quota, share = quota_cores(), len(os.sched_getaffinity(0)) / local_ranks
    if quota is None:
        return share
    return min(share, quota if has_own_cgroup() else quota / local_ranks)


def has_own_cgroup() -> bool:
    """Whether this process is in other cgroups than its parent, as each rank of a lab is.

    Its quota is then not shared. Ranks that a launcher started in its own cgroup share the quota of that cgroup.
    """
    cgroups = _read_words(OWN_CGROUP)
    return bool(cgroups) and cgroups != _read_words(Path(f"/proc/{os.getppid()}/cgroup"))


def quota_cores(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """The smallest number of cores that the lab or a cgroup of this process allows; None without a limit."""
    quotas = [] if (lab_quota := lab_cores()) is None else [lab_quota]
    for folder in _cgroups(root, own):
        words = _read_words(folder / "cpu.max") or [
            *_read_words(folder / "cpu.cfs_quota_us"),
            *_read_words(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0] not in UNLIMITED:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


@dataclass(frozen=True, slots=True)
class MachineUsage:
    """A reading of the host's counters. The first three are seconds since an arbitrary start."""

    clock: float
    stolen: float  # time used by other guests of the physical machine, mean over this process's cores
    throttled: float  # time for which a cgroup of this process was throttled
    load: float  # processes that run or wait for a core, the host's one-minute average


class MachineMeter:
    """Measures stolen and throttled processor time in each window of a run.

    `expected_load` is the load average that the run itself causes.
    """

    def __init__(self, expected_load: float) -> None:
        self._expected_load = expected_load
        self._last = read_usage()

    def measure_window(self) -> dict[str, float]:
        """Stolen and throttled time as shares of the time since the last call, and the current load average."""
        before, self._last = self._last, read_usage()
        seconds = max(self._last.clock - before.clock, 1e-9)
        return {
            "stolen_share": round((self._last.stolen - before.stolen) / seconds, 4),
            "throttled_share": round((self._last.throttled - before.throttled) / seconds, 4),
            "load": self._last.load,
            "expected_load": self._expected_load,
        }


def read_usage() -> MachineUsage:
    return MachineUsage(time.perf_counter(), _stolen_seconds(), _throttled_seconds(), os.getloadavg()[0])


def _stolen_seconds() -> float:
    """Steal time from /proc/stat, mean over this process's cores; 0 if unknown."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        columns = [line.split() for line in STAT.read_text().splitlines()]
    except OSError:
        return 0.0
    ticks = [int(column[STEAL_COLUMN]) for column in columns if column[0] in cores and len(column) > STEAL_COLUMN]
    return sum(ticks) / max(1, len(ticks)) / os.sysconf("SC_CLK_TCK")


def _throttled_seconds() -> float:
    """The largest throttled time of this process's cgroups and their ancestors, which may have the quota.

    cgroup v2 counts in microseconds, v1 in nanoseconds.
    """
    seconds = 0.0
    for folder in _cgroups(CGROUPS, OWN_CGROUP):
        words = _read_words(folder / "cpu.stat")
        stats = dict(zip(words[::2], words[1::2], strict=False))
        seconds = max(seconds, int(stats.get("throttled_usec", 0)) / 1e6, int(stats.get("throttled_time", 0)) / 1e9)
    return seconds


def _cgroups(root: Path, own: Path) -> Iterator[Path]:
    """Directories of this process's cgroups that can limit processor time, and of their ancestors."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if (root / controllers).is_dir() else root / "cpu" if controllers else root
        relative = Path(path.strip("/"))
        yield from (top / part for part in (relative, *relative.parents))


def _read_words(path: Path) -> list[str]:
    """The words of a file; none if it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []
