"""The shape of a lab: hosts, their ranks, and the rates of the links between them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.errors import UserError
from shardwright.spec.checks import check_non_negative, check_unique, raise_if_any

MIN_CPU = 0.05
MAX_RANKS = 250  # the last byte of an IPv4 address


@dataclass(frozen=True, slots=True)
class Host:
    """A host; rates are such as "1gbit", in each direction, or "" for a link without a rate."""

    ranks: int = 1
    uplink: str = ""  # from the host to its rack, or to the core
    local: str = ""  # from each rank to its host
    front: str = ""  # of the host on the second network; empty: not connected to it
    cpu: float = 0.0  # cores of each rank; 0: no limit
    rack: str = ""


@dataclass(frozen=True, slots=True)
class Rack:
    name: str
    uplink: str = ""  # from the rack to the core


@dataclass(frozen=True, slots=True)
class Shape:
    hosts: tuple[Host, ...] = field(default_factory=tuple)
    racks: tuple[Rack, ...] = ()
    burst: str = "128kb"  # bytes that a link passes at once; see docs/lab.md before you change it
    priorities: bool = False  # traffic whose type of service is "low delay" overtakes the rest

    @property
    def num_ranks(self) -> int:
        return sum(host.ranks for host in self.hosts)

    def host_of(self, rank: int) -> int:
        ends = [sum(host.ranks for host in self.hosts[: index + 1]) for index in range(len(self.hosts))]
        return next(index for index, end in enumerate(ends) if rank < end)

    def verify(self) -> None:
        raise_if_any(_faults(self))


def parse_bits_per_second(rate: str) -> float:
    """Parse a rate such as "1gbit", "1.5gbit", "200mbit" or "64kbit"."""
    return _number(rate, "rate", {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9})


def parse_bytes(size: str) -> int:
    return int(_number(size, "size", {"b": 1, "kb": 1024, "mb": 1024**2}))


def _number(text: str, kind: str, units: dict[str, float]) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", text.strip().lower())
    if not match or match[2] not in units or not float(match[1]):
        raise UserError(f'{kind} "{text}"; wanted a number and one of {", ".join(units)}, as in "1{list(units)[-1]}"')
    return float(match[1]) * units[match[2]]


def _faults(shape: Shape) -> Iterator[str]:
    if not shape.hosts:
        yield "a lab without hosts; give at least one host"
    if shape.num_ranks > MAX_RANKS:
        yield f"a lab of {shape.num_ranks} ranks; the maximum is {MAX_RANKS}"
    yield from check_unique("rack", (rack.name for rack in shape.racks))
    rack_names = {rack.name for rack in shape.racks}
    for number, host in enumerate(shape.hosts):
        yield from _host_faults(f"host {number}", host, rack_names)
    for rate in {rate for host in shape.hosts for rate in (host.uplink, host.local, host.front)} | {
        rack.uplink for rack in shape.racks
    }:
        try:
            if rate:
                parse_bits_per_second(rate)
        except UserError as error:
            yield str(error)
    try:
        parse_bytes(shape.burst)
    except UserError as error:
        yield f"burst: {error}"


def _host_faults(subject: str, host: Host, rack_names: set[str]) -> Iterator[str]:
    if host.ranks < 1:
        yield f"{subject}: {host.ranks} ranks; wanted one or more"
    yield from check_non_negative(subject, cpu=host.cpu)
    if 0 < host.cpu < MIN_CPU:
        yield f"{subject}: cpu is {host.cpu}; the minimum is {MIN_CPU}, or 0 for no limit"
    if host.rack and host.rack not in rack_names:
        yield f'{subject}: no rack "{host.rack}"; racks: {", ".join(sorted(rack_names)) or "none"}'
