"""Who takes part: named axes of ranks, the lanes between them, and the device of this process.

A mesh makes all process groups at once, in the plan's order, on every rank; later code is handed a mesh and never
makes groups of its own. A lane is a communicator of its own on every axis, so that what runs on one never waits for
what runs on another.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import combinations, count, product
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm import store
from shardwright.comm.all_gather_json import all_gather_json
from shardwright.comm.heartbeat import Heartbeat
from shardwright.comm.pending import Waiter
from shardwright.comm.shared_memory import Channel, HostMembers, connect_channels
from shardwright.errors import UserError, did_you_mean

K = TypeVar("K")
DEFAULT_LANE = "main"  # the lane of a mesh that names none
NUM_CONCURRENT_SUMS = 2  # works in steps that a group has under way
CLOSED = "closed"  # in the place of a process group; None would be torch's group of all ranks


def world_size() -> int:
    """The processes of this job, as torch.distributed or torchrun's environment has it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Whether this process speaks for the job."""
    return os.environ.get("RANK", "0") == "0"


def current_rank() -> int:
    """The rank of this process in the job, from the launcher's RANK; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def host_topology() -> tuple[int, int]:
    """The hosts of this job and the ranks of this one, as the launcher told; without one they are all on this host."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    return -(-world_size() // local), local


def host_id(rank: int) -> int:
    """A number of this host: its first rank, or its place where the launcher numbers no local ranks."""
    local = os.environ.get("LOCAL_RANK")
    return rank // host_topology()[1] if local is None else rank - int(local)


def is_emulated() -> bool:
    """Whether hosts and links are the lab's."""
    return "SHARDWRIGHT_LAB" in os.environ


def lab_cores() -> float | None:
    """The CPU quota of a rank of the lab, whose network namespace hides the files of its cgroup; None without one."""
    cores = os.environ.get("SHARDWRIGHT_LAB_CPU")
    return float(cores) if cores else None


def select_device() -> torch.device:
    """The GPU of this rank, made the current one, where there are GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise UserError(f"rank {local} of this host, which has {torch.cuda.device_count()} GPUs; start as many ranks")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _join(backend: str, timeout: timedelta) -> None:
    """Initialize torch.distributed through the launcher's store, or through one that rank 0 serves.

    A launcher's store outlives the ranks. The keys of each attempt have their own prefix; otherwise restarted ranks
    would read the addresses of dead ranks and wait for them.
    """
    if _is_single_host():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", store.LOOPBACK_INTERFACE)
    rank, host, port = (_read_variable(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        job_store = _store(int(rank))
    elif rank == "0":
        unknown = "LOCAL_WORLD_SIZE" not in os.environ and host not in store.LOOPBACK_NAMES
        seconds = timeout.total_seconds()
        job_store = store.serve(host, int(port), several_hosts=unknown or host_topology()[0] > 1, seconds=seconds)
    else:
        job_store = store.connect(host, int(port), seconds=timeout.total_seconds())
    dist.init_process_group(backend, timeout=timeout, store=job_store, rank=int(rank), world_size=world_size())


def _is_single_host() -> bool:
    """Whether all ranks are on this host, according to the launcher's variables."""
    return "LOCAL_WORLD_SIZE" in os.environ and host_topology()[0] == 1


def _read_variable(name: str) -> str:
    if name not in os.environ:
        raise UserError(f"'{name}' is not set; start the ranks with torchrun or shardwright lab run")
    return os.environ[name]


def _store(rank: int) -> Any:
    """A separate connection to the job's store, restricted to the keys of this attempt and of the next mesh."""
    connection = store.connect(_read_variable("MASTER_ADDR"), int(_read_variable("MASTER_PORT")))
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return store.open_mesh(store.open_attempt(connection, restarts, world_size()), rank)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that talk on one lane, this one among them."""

    ranks: tuple[int, ...]
    index: int  # this rank's place in `ranks`
    lane: str
    process_group: Any  # torch's process group; None for a group of one
    heartbeat: Heartbeat | None
    waiter: Waiter | None  # of its lane; none on a GPU
    check: bool = False  # whether ranks compare every collective before they enter it
    call_counter: Iterator[int] = field(default_factory=count, compare=False)
    local_channels: Mapping[int, Channel] = field(
        default_factory=dict, compare=False
    )  # those of this host, by place in `ranks`
    hosts: HostMembers = ()  # members that are all on one host
    tag: int = 0  # of messages between two ranks
    hierarchical_groups: tuple[
        "Group", ...
    ] = ()  # the same ranks for works in steps, whose messages no others come between
    hierarchical_calls: Iterator[int] = field(default_factory=count, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def shares_memory(self) -> bool:
        """Whether every member is near every other."""
        return len(self.hosts) == 1 and len(self.local_channels) == self.size - 1

    @property
    def has_even_hosts(self) -> bool:
        """Whether it has several hosts, and the same number of ranks, more than one, on each."""
        return len(self.hosts) > 1 and {len(host) for host in self.hosts} == {self.size // len(self.hosts)} != {1}

    def next_hierarchical_group(self) -> "Group":
        """The next of `sums`, so that as many works are under way: one crosses while another is inside hosts."""
        return self.hierarchical_groups[next(self.hierarchical_calls) % len(self.hierarchical_groups)]

    def receive(self, member: int, into: Tensor) -> Any:
        """The work of a message from a member, which takes them in the order in which they were sent."""
        near = self.local_channels.get(member)
        return near.receive(into) if near else self.process_group.recv([into], member, self.tag)

    def send(self, member: int, x: Tensor) -> Any:
        near = self.local_channels.get(member)
        return near.send(x) if near else self.process_group.send([x], member, self.tag)

    def check_open(self) -> None:
        if self.process_group is CLOSED:
            raise UserError("the mesh of this job has been closed: build a new job")

    def close(self) -> None:
        """Torch ends a group's threads with the last reference to it, and a job lives on after its mesh."""
        object.__setattr__(self, "process_group", CLOSED)
        for channel in self.local_channels.values():
            channel.close()


class Mesh:
    """Axes are (name, size) pairs, outermost first; ranks are numbered along the last axis first.

    It joins the job that torchrun (or the lab) started; without one it is a mesh of one rank. With `check` the ranks of
    a group compare what they are about to do, which costs a message each time and names the first difference.
    Of the sets of axes only those in `along` have groups, all unless said: on the CPU each has a thread of its own.
    """

    def __init__(
        self,
        axes: Sequence[tuple[str, int]] = (),
        *,
        lanes: Sequence[str] = (),
        device: torch.device | str = "cpu",
        timeout_seconds: float = 60.0,
        check: bool = False,
        memory: bool = True,
        along: Sequence[Sequence[str] | str] | None = None,
    ) -> None:
        self.check = check
        self.axes = tuple(axes)
        self.lanes = tuple(lanes) or (DEFAULT_LANE,)
        self.device = torch.device(device)
        self.timeout_seconds = timeout_seconds
        if self.size != world_size():
            raise UserError(
                f"{world_size()} processes were started for a mesh of {self.size} ranks (axes {dict(self.axes)}); "
                "start as many as the axes' sizes multiply to, or plan for as many as were started"
            )
        self._joined = self.size > 1 and not dist.is_initialized()
        if self._joined:
            _join(self._backend, timedelta(seconds=timeout_seconds))
        self.rank = dist.get_rank() if self.size > 1 else 0
        self.heartbeat = Heartbeat(self.rank, self.size, _store(self.rank)) if self.size > 1 else None
        self._handles: list[Any] = []
        on_cpu = self.device.type == "cpu"  # on a GPU to wait is to make this thread's stream wait
        self._waiters = {lane: Waiter() if on_cpu else None for lane in self.lanes}
        self._along = (
            {self._wanted((axes,) if isinstance(axes, str) else axes) for axes in along} if along is not None else None
        )
        self._groups = {(lane, names): group for lane in self.lanes for names, group in self._made(lane)}
        self._memory = memory and os.environ.get("SHARDWRIGHT_MEMORY") != "0"
        if on_cpu and self.size > 1:
            self._groups = self._near(self._groups)

    @property
    def size(self) -> int:
        return prod(size for _, size in self.axes)

    @property
    def near(self) -> tuple[int, ...]:
        """The other ranks that messages reach through the memory of this host."""
        return tuple(sorted(self.group().ranks[at] for at in self.group().local_channels))

    def index(self, axis: str) -> int:
        """This rank's place along an axis."""
        self._known(axis)
        inner = prod(size for _, size in self.axes[[name for name, _ in self.axes].index(axis) + 1 :])
        return self.rank // inner % dict(self.axes)[axis]

    def view(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from this one along these axes only, this one among them."""
        for axis in axes:
            self._known(axis)
        return next(ranks for ranks in self._slices(tuple(axes)) if self.rank in ranks)

    def group(self, axes: Sequence[str] | str = (), lane: str = "") -> Group:
        """The ranks of `view`, on a lane; all axes and the first lane unless said."""
        lane = lane or self.lanes[0]
        if lane not in self.lanes:
            raise UserError(f'no lane "{lane}"{did_you_mean(lane, self.lanes)}')
        wanted = self._wanted((axes,) if isinstance(axes, str) else axes)
        if (lane, wanted) not in self._groups:
            raise UserError(
                f"this mesh has no groups along {list(wanted)}: make it with Mesh(..., along=[{list(wanted)}])"
            )
        return self._groups[lane, wanted]

    def alone(self, lane: str = "") -> Group:
        """This rank without others, on a lane."""
        return replace(
            self.group((), lane),
            ranks=(self.rank,),
            index=0,
            process_group=None,
            local_channels={},
            hosts=(),
            hierarchical_groups=(),
        )

    def close(self) -> None:
        """Leave the job, if this mesh has joined it."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        groups = [one for group in self._groups.values() for one in (group, *group.hierarchical_groups)]
        waiters = [*filter(None, {one.waiter for one in groups})]
        for waiter in waiters:
            waiter.stop()
        for group in groups:
            group.close()
        for waiter in waiters:
            waiter.join()
        handles, self._handles = self._handles, []
        if not dist.is_initialized():
            return
        if self._joined:
            dist.destroy_process_group()
        for handle in () if self._joined else handles:
            dist.destroy_process_group(handle)

    @property
    def _backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def _near(self, groups: Mapping[K, Group]) -> dict[K, Group]:
        """The same with channels to the ranks of this host, if memory is used, and with more for sums over several."""
        each = {id(group): group for group in groups.values() if group.size > 1}
        found = dict(zip(each, self._connected(list(each.values())), strict=True))
        if 1 < len(found[id(self.group())].hosts) < self.size:
            even = [key for key, group in found.items() if group.has_even_hosts]
            for tag in range(1, 1 + NUM_CONCURRENT_SUMS):
                for key, sums in zip(even, self._connected([found[key] for key in even]), strict=True):
                    more = (replace(sums, waiter=Waiter(), tag=tag),) if sums.has_even_hosts else ()
                    found[key] = replace(found[key], hierarchical_groups=(*found[key].hierarchical_groups, *more))
        return {key: found.get(id(group), group) for key, group in groups.items()}

    def _connected(self, groups: Sequence[Group]) -> list[Group]:
        """The same with channels of their own."""

        def tell(what: Any) -> list[Any]:
            return all_gather_json(what, self.size, self.group().process_group)

        ranks, used = [one.ranks for one in groups], self._memory
        found = connect_channels(self.rank, host_id(self.rank), ranks, tell, self.timeout_seconds, enabled=used)
        return [
            replace(group, local_channels={group.ranks.index(rank): one for rank, one in near.items()}, hosts=hosts)
            for group, (near, hosts) in zip(groups, found, strict=True)
        ]

    def _wanted(self, axes: Sequence[str]) -> tuple[str, ...]:
        """In the order of the mesh; without one, all."""
        for axis in axes:
            self._known(axis)
        return tuple(name for name, _ in self.axes if name in axes or not axes)

    def _known(self, axis: str) -> None:
        if axis not in dict(self.axes):
            raise UserError(f'no mesh axis "{axis}"; this mesh has {[name for name, _ in self.axes]}')

    def _made(self, lane: str) -> Iterator[tuple[tuple[str, ...], Group]]:
        """A group for every set of axes; sets with the same ranks share one."""
        names = tuple(name for name, _ in self.axes)
        made: dict[tuple[tuple[int, ...], ...], Group] = {}
        for number in range(len(names) + 1):
            for axes in combinations(names, number):
                if self._along is not None and axes != names and axes not in self._along:
                    continue
                slices = tuple(self._slices(axes))
                if slices not in made:
                    made[slices] = self._join(slices, lane)
                yield axes, made[slices]

    def _join(self, slices: Sequence[tuple[int, ...]], lane: str) -> Group:
        mine = next(ranks for ranks in slices if self.rank in ranks)
        handle = None
        for ranks in slices if len(mine) > 1 else ():  # every rank makes every group, in one order
            timeout = timedelta(seconds=self.timeout_seconds)
            found = dist.new_group(list(ranks), timeout=timeout, backend=self._backend)
            if ranks == mine:
                handle = found
                self._handles.append(found)
        return Group(mine, mine.index(self.rank), lane, handle, self.heartbeat, self._waiters[lane], self.check)

    def _slices(self, axes: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
        """All ranks, cut into those that differ along these axes only."""
        sizes = [size for _, size in self.axes]
        inside = [range(size) if name in axes else (None,) for name, size in self.axes]
        outside = [(None,) if name in axes else range(size) for name, size in self.axes]
        for fixed in product(*outside):
            yield tuple(self._rank(sizes, fixed, free) for free in product(*inside))

    @staticmethod
    def _rank(sizes: Sequence[int], fixed: Sequence[int | None], free: Sequence[int | None]) -> int:
        rank = 0
        for size, one, other in zip(sizes, fixed, free, strict=True):
            rank = rank * size + (one if one is not None else other or 0)
        return rank
