"""The processors of this host: the number of threads of a rank, and processor time taken away from a run."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwright.comm.mesh import lab_cores

STAT, CGROUPS, OWN_CGROUP = Path("/proc/stat"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
STEAL_COLUMN = 8  # the column of /proc/stat
UNLIMITED = ("max", "-1")


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads a rank computes with. As text: the number and its reason."""

    count: int
    usable_cores: float  # affinity and cgroup quota of this process
    why: str
    is_set: bool  # by the user, in OMP_NUM_THREADS

    def __str__(self) -> str:
        return self.why


def choose_threads(workers: int, local_ranks: int, omp_num_threads: str) -> Threads:
    """Split the usable cores among the `ranks` of this host, each with so many loader `workers`; at least one thread.

    `omp_num_threads` is OMP_NUM_THREADS as the user set it; a valid number there is used unchanged.
    """
    affinity, quota = len(os.sched_getaffinity(0)), quota_cores()
    usable = min(float(affinity), quota or float(affinity))
    count = max(1, int(usable / local_ranks) - workers)
    of_user = omp_num_threads.partition(",")[0].strip()  # one number, or one of each level of nesting
    is_set = of_user.isdigit() and int(of_user) > 0
    if is_set:
        count = int(of_user)
    parts = [f"{count} for computing", f"{workers} loader worker{'s' * (workers != 1)}"]
    each = f" in each of {local_ranks} ranks" if local_ranks > 1 else ""
    shared = f"{' and '.join(parts if workers else parts[:1])}{each}"
    limit = f", cgroup quota {quota:.3g}" if quota else ""
    why = f"threads: {shared}, on {affinity} core{'s' * (affinity != 1)}{limit}"
    if is_set:
        why += f"; OMP_NUM_THREADS={omp_num_threads} is set"
    if local_ranks * (count + workers) > usable:
        why += "; these are too few cores for all to run at once"
    return Threads(count, usable, why, is_set)


def rank_cores(local_ranks: int) -> float:
    """The cores that one of the `ranks` of this host can use; less than one where a quota says so."""
    quota, share = quota_cores(), len(os.sched_getaffinity(0)) / local_ranks
    if quota is None:
        return share
    return min(share, quota if has_own_cgroup() else quota / local_ranks)


def has_own_cgroup() -> bool:
    """Whether this process is in other cgroups than its parent, as each rank of a lab is: a quota is then its own.
    Ranks that one launcher started in its own cgroup share that one's quota."""
    own = _read(OWN_CGROUP)
    return bool(own) and own != _read(Path(f"/proc/{os.getppid()}/cgroup"))


def quota_cores(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """The cores that the lab and the cgroups of this process allow, the least of them; None without a limit."""
    quotas = [] if (of_lab := lab_cores()) is None else [of_lab]
    for folder in _cgroups(root, own):
        words = _read(folder / "cpu.max") or [
            *_read(folder / "cpu.cfs_quota_us"),
            *_read(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0] not in UNLIMITED:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


@dataclass(frozen=True, slots=True)
class MachineUsage:
    """A reading of the host's counters. The first three are seconds since some start."""

    clock: float
    stolen: float  # by other guests of the physical machine, in the mean over this process's cores
    throttled: float  # that the cgroup of this process was throttled
    load: float  # processes that run or wait for a core, the host's one-minute average


class MachineMeter:
    """Measures processor time taken away in each window of a run. `expected_load`: the load of the run itself."""

    def __init__(self, expected_load: float) -> None:
        self._expected_load = expected_load
        self._last = read_usage()

    def measure_window(self) -> dict[str, float]:
        """Shares of the time since the last call, and the load average now."""
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
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        columns = [line.split() for line in STAT.read_text().splitlines()]
    except OSError:
        return 0.0
    ticks = [int(column[STEAL_COLUMN]) for column in columns if column[0] in cores and len(column) > STEAL_COLUMN]
    return sum(ticks) / max(1, len(ticks)) / os.sysconf("SC_CLK_TCK")


def _throttled_seconds() -> float:
    """cgroup v2 counts microseconds, v1 nanoseconds. A cgroup above may be the one with the quota."""
    most = 0.0
    for folder in _cgroups(CGROUPS, OWN_CGROUP):
        words = _read(folder / "cpu.stat")
        counters = dict(zip(words[::2], words[1::2], strict=False))
        most = max(most, int(counters.get("throttled_usec", 0)) / 1e6, int(counters.get("throttled_time", 0)) / 1e9)
    return most


def _cgroups(root: Path, own: Path) -> Iterator[Path]:
    """Folders of this process's cgroups that limit processor time, and of their parents."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if (root / controllers).is_dir() else root / "cpu" if controllers else root
        inside = Path(path.strip("/"))
        yield from (top / part for part in (inside, *inside.parents))


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
