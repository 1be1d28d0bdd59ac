"""Device mesh: named axes of ranks, process groups for sets of axes and lanes, this rank's device.

A mesh creates all process groups at once, in the plan's order, on every rank; later code only takes groups from it. A
lane is a separate communicator for every set of axes, so that collectives on one lane never wait for another lane.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import combinations, product
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwright.comm import store
from shardwright.comm.all_gather_json import all_gather_json
from shardwright.comm.backend import GLOO, agree_on_backend, choose_device
from shardwright.comm.group import Group
from shardwright.comm.heartbeat import Heartbeat
from shardwright.comm.pending import Waiter
from shardwright.comm.sent_bytes import SentBytes
from shardwright.comm.shared_memory import connect_channels
from shardwright.comm.staging import staging_for
from shardwright.comm.transport.servers import ServerConnector, TableServers
from shardwright.errors import UserError, did_you_mean
from shardwright.spec.lanes import MAIN

K = TypeVar("K")
LaneAxes = tuple[str, tuple[str, ...]]  # a lane, and the axes along which its groups are
DEFAULT_LANE = MAIN  # the lane of a mesh without named lanes
NUM_HIERARCHICAL_GROUPS = 2  # hierarchical collectives that a group can have in flight


def world_size() -> int:
    """The number of processes of this job, from torch.distributed or the launcher's WORLD_SIZE."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Whether this process is rank 0 of the job, which prints and writes for all."""
    return os.environ.get("RANK", "0") == "0"


def current_rank() -> int:
    """The rank of this process in the job, from the launcher's RANK; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def host_topology() -> tuple[int, int]:
    """Number of hosts and of ranks per host, from the launcher; without one all ranks are on this host."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    return -(-world_size() // local), local


def host_id(rank: int) -> int:
    """A number that identifies this host: its first rank, or its index if there is no LOCAL_RANK."""
    local = os.environ.get("LOCAL_RANK")
    return rank // host_topology()[1] if local is None else rank - int(local)


def is_emulated() -> bool:
    """Whether the lab emulates the hosts and links of this job."""
    return "SHARDWRIGHT_LAB" in os.environ


def lab_cores() -> float | None:
    """The CPU quota of a rank of the lab, in cores, from the environment; None without one.

    The network namespace of the rank hides the files of its cgroup.
    """
    cores = os.environ.get("SHARDWRIGHT_LAB_CPU")
    return float(cores) if cores else None


def has_emulated_link() -> bool:
    """Whether the lab limits the rate of this rank's link, so that messages inside its host must use it."""
    return "SHARDWRIGHT_LAB_LINK" in os.environ


def select_device(setting: str = "auto") -> torch.device:
    """The device of this rank, by the setting `run.device`; a GPU becomes the current one."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = choose_device(setting, num_gpus, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _init_process_group(timeout: timedelta) -> None:
    """Initialize torch.distributed, over Gloo, through the launcher's store, or through one that rank 0 serves.

    A launcher's store outlives the ranks. The keys of each attempt have their own prefix; otherwise restarted ranks
    would read the addresses of dead ranks and wait for them.
    """
    if _is_single_host():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", store.LOOPBACK_INTERFACE)
    rank, host, port = (_read_variable(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        job_store = _open_store(int(rank))
    elif rank == "0":
        unknown = "LOCAL_WORLD_SIZE" not in os.environ and host not in store.LOOPBACK_NAMES
        seconds = timeout.total_seconds()
        job_store = store.serve(host, int(port), several_hosts=unknown or host_topology()[0] > 1, seconds=seconds)
    else:
        job_store = store.connect(host, int(port), seconds=timeout.total_seconds())
    dist.init_process_group(GLOO, timeout=timeout, store=job_store, rank=int(rank), world_size=world_size())


def _is_single_host() -> bool:
    """Whether all ranks are on this host, according to the launcher's variables."""
    return "LOCAL_WORLD_SIZE" in os.environ and host_topology()[0] == 1


def _read_variable(name: str) -> str:
    if name not in os.environ:
        raise UserError(f"'{name}' is not set; start the ranks with torchrun or shardwright lab run")
    return os.environ[name]


def _open_store(rank: int) -> Any:
    """Open a connection to the job's store, with a key prefix for this attempt and the next number of a mesh in it."""
    connection = store.connect(_read_variable("MASTER_ADDR"), int(_read_variable("MASTER_PORT")))
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return store.open_mesh(store.open_attempt(connection, restarts, world_size()), rank)


class Mesh:
    """All ranks of a job on named axes, with a process group for each set of axes and lane.

    `axes` are (name, size) pairs, outermost first; ranks are numbered along the last axis first. The mesh initializes
    torch.distributed for the job that torchrun (or the lab) started; without one it has one rank. With `check` the
    ranks of a group compare each collective before they issue it, which costs two blocking all-gathers, and report
    the first difference. `memory`: use shared memory between ranks of a host. `groups`: the groups to make (no axes:
    along all), first the default lane's along all axes; default: on every lane of `lanes` along every set of axes. Over
    Gloo each lane has a thread that waits, and each hierarchical group its own.
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
        groups: Sequence[LaneAxes] | None = None,
    ) -> None:
        self.check = check
        self.servers: TableServers | None = None  # given by `mesh_for`
        self.server_connector: ServerConnector | None = None  # of the last job on this mesh
        self.axes = tuple(axes)
        self.lanes = tuple(dict.fromkeys(lane for lane, _ in groups or ())) or tuple(lanes) or (DEFAULT_LANE,)
        self.device = torch.device(device)
        self.timeout_seconds = timeout_seconds
        if self.size != world_size():
            raise UserError(
                f"{world_size()} processes were started for a mesh of {self.size} ranks (axes {dict(self.axes)}); "
                f"start {self.size} processes, or make a plan for {world_size()} ranks"
            )
        self._owns_process_group = self.size > 1 and not dist.is_initialized()
        if self._owns_process_group:
            _init_process_group(timedelta(seconds=timeout_seconds))
        self.rank = dist.get_rank() if self.size > 1 else 0
        self.backend, self.heartbeat = GLOO, None
        if self.size > 1:
            store = _open_store(self.rank)
            self.backend = agree_on_backend(store, self.rank, self.size, self.device)
            self.heartbeat = Heartbeat(self.rank, self.size, store)
        self._handles: list[Any] = []
        self.sent = SentBytes()
        over_gloo = self.backend == GLOO  # with NCCL, to wait for a work makes the current stream wait
        self._staging = staging_for(self.device, over_gloo=over_gloo)
        self._waiters = {lane: Waiter() if over_gloo else None for lane in self.lanes}
        pairs = self._every_group() if groups is None else ((lane, self._order_axes(axes)) for lane, axes in groups)
        self._groups = self._make_groups([*dict.fromkeys(pairs)])
        self._memory = memory and not has_emulated_link()
        if over_gloo and self.size > 1:
            self._groups = self._add_channels(self._groups)
        self.sent.set_host(self.rank, self.group().hosts, host_topology()[1])

    @property
    def size(self) -> int:
        return prod(size for _, size in self.axes)

    @property
    def near(self) -> tuple[int, ...]:
        """The other ranks that this rank reaches through shared memory."""
        return tuple(sorted(self.group().ranks[index] for index in self.group().local_channels))

    def index(self, axis: str) -> int:
        """This rank's index along an axis."""
        self._check_axis(axis)
        inner = prod(size for _, size in self.axes[[name for name, _ in self.axes].index(axis) + 1 :])
        return self.rank // inner % dict(self.axes)[axis]

    def view(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from this rank only along these axes, including this rank."""
        for axis in axes:
            self._check_axis(axis)
        return next(ranks for ranks in self._slices(tuple(axes)) if self.rank in ranks)

    def position(self, axes: Sequence[str]) -> tuple[int, int]:
        """This rank's index among the ranks of `view`, and their number."""
        ranks = self.view(axes)
        return ranks.index(self.rank), len(ranks)

    def group(self, axes: Sequence[str] | str = (), lane: str = "") -> Group:
        """The group of the ranks of `view`, on a lane; default: all axes, the first lane."""
        lane = lane or self.lanes[0]
        if lane not in self.lanes:
            raise UserError(f'no lane "{lane}"{did_you_mean(lane, self.lanes)}')
        names = self._order_axes(axes)
        if (lane, names) not in self._groups:
            raise UserError(
                f'this mesh has no group of lane "{lane}" along {list(names)}: '
                f'make it with Mesh(..., groups=[..., ("{lane}", {list(names)})])'
            )
        return self._groups[lane, names]

    def alone(self, lane: str = "") -> Group:
        """A group of only this rank, on a lane."""
        lane = lane or self.lanes[0]
        return replace(
            next(group for (group_lane, _), group in self._groups.items() if group_lane == lane),
            ranks=(self.rank,),
            index=0,
            process_group=None,
            local_channels={},
            hosts=(),
            hierarchical_groups=(),
        )

    def close(self) -> None:
        """Stop all threads and destroy the process groups that this mesh created."""
        if self.server_connector is not None:
            self.server_connector.close()
        if self.heartbeat is not None:
            self.heartbeat.stop()
        groups = [group for base in self._groups.values() for group in (base, *base.hierarchical_groups)]
        waiters = [*filter(None, {group.waiter for group in groups})]
        for waiter in waiters:
            waiter.stop()
        for group in groups:
            group.close()
        for waiter in waiters:
            waiter.join()
        handles, self._handles = self._handles, []
        if not dist.is_initialized():
            return
        if self._owns_process_group:
            dist.destroy_process_group()
        for handle in () if self._owns_process_group else handles:
            dist.destroy_process_group(handle)

    def _add_channels(self, groups: Mapping[K, Group]) -> dict[K, Group]:
        """Connect the groups through shared memory, and add hierarchical groups to those over several hosts."""
        distinct = {id(group): group for group in groups.values() if group.size > 1}
        by_id = dict(zip(distinct, self._connect(list(distinct.values())), strict=True))
        if 1 < len(by_id[id(self.group())].hosts) < self.size:
            even = [key for key, group in by_id.items() if group.has_even_hosts]
            for tag in range(1, 1 + NUM_HIERARCHICAL_GROUPS):
                for key, group in zip(even, self._connect([by_id[key] for key in even]), strict=True):
                    new = (replace(group, waiter=Waiter(), tag=tag),) if group.has_even_hosts else ()
                    by_id[key] = replace(by_id[key], hierarchical_groups=(*by_id[key].hierarchical_groups, *new))
        return {key: by_id.get(id(group), group) for key, group in groups.items()}

    def _connect(self, groups: Sequence[Group]) -> list[Group]:
        """Copies of the groups with new channels, if shared memory is used, and their members by host."""

        def all_gather(value: Any) -> list[Any]:
            return all_gather_json(value, self.size, self.group().process_group)

        ranks, timeout = [group.ranks for group in groups], self.timeout_seconds
        pairs = connect_channels(self.rank, host_id(self.rank), ranks, all_gather, timeout, enabled=self._memory)
        return [
            replace(group, local_channels={group.ranks.index(rank): end for rank, end in channels.items()}, hosts=hosts)
            for group, (channels, hosts) in zip(groups, pairs, strict=True)
        ]

    def _order_axes(self, axes: Sequence[str] | str) -> tuple[str, ...]:
        """The given axes in the order of the mesh; all axes if none are given."""
        axes = (axes,) if isinstance(axes, str) else axes
        for axis in axes:
            self._check_axis(axis)
        return tuple(name for name, _ in self.axes if name in axes or not axes)

    def _check_axis(self, axis: str) -> None:
        if axis not in dict(self.axes):
            raise UserError(f'no mesh axis "{axis}"; this mesh has {[name for name, _ in self.axes]}')

    def _every_group(self) -> Iterator[LaneAxes]:
        """Every lane with every set of axes."""
        names = tuple(name for name, _ in self.axes)
        for lane, num_axes in product(self.lanes, range(min(1, len(names)), len(names) + 1)):
            yield from ((lane, axes) for axes in combinations(names, num_axes))

    def _make_groups(self, pairs: Sequence[LaneAxes]) -> dict[LaneAxes, Group]:
        """Make the group of each lane and set of axes; sets with the same ranks share a group."""
        groups: dict[tuple[str, tuple[tuple[int, ...], ...]], Group] = {}
        for lane, axes in pairs:
            slices = tuple(self._slices(axes))
            if (lane, slices) not in groups:
                groups[lane, slices] = self._make_group(slices, lane)
        return {(lane, axes): groups[lane, tuple(self._slices(axes))] for lane, axes in pairs}

    def _make_group(self, slices: Sequence[tuple[int, ...]], lane: str) -> Group:
        members = next(ranks for ranks in slices if self.rank in ranks)
        handle = None
        for ranks in slices if len(members) > 1 else ():  # every rank makes every group, in the same order
            timeout = timedelta(seconds=self.timeout_seconds)
            process_group = dist.new_group(list(ranks), timeout=timeout, backend=self.backend)
            if ranks == members:
                handle = process_group
                self._handles.append(process_group)
        waiter, index = self._waiters[lane], members.index(self.rank)
        return Group(
            members,
            index,
            lane,
            handle,
            self.heartbeat,
            waiter,
            self.check,
            sent=self.sent,
            device=self.device,
            staging=self._staging,
        )

    def _slices(self, axes: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
        """All ranks, partitioned into ranks that differ only along these axes."""
        sizes = [size for _, size in self.axes]
        inside = [range(size) if name in axes else (None,) for name, size in self.axes]
        outside = [(None,) if name in axes else range(size) for name, size in self.axes]
        for fixed in product(*outside):
            yield tuple(self._rank(sizes, fixed, free) for free in product(*inside))

    @staticmethod
    def _rank(sizes: Sequence[int], fixed: Sequence[int | None], free: Sequence[int | None]) -> int:
        rank = 0
        for size, fixed_index, free_index in zip(sizes, fixed, free, strict=True):
            rank = rank * size + (fixed_index if fixed_index is not None else free_index or 0)
        return rank
