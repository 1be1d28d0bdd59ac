"""What a lab looks like: hosts, the ranks in them, and the rates of the links between."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.errors import UserError
from shardwright.spec.checks import check_non_negative, check_unique, raise_if_any

MIN_CPU = 0.05
MAX_RANKS = 250  # one number of an address


@dataclass(frozen=True, slots=True)
class Host:
    """Rates are "1gbit", "200mbit", or empty for an unshaped link; each is of both directions alike."""

    ranks: int = 1
    uplink: str = ""  # from the host to its rack, or to the core
    local: str = ""  # from each rank to its host
    front: str = ""  # of the host on the second network; empty: it is not on it
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
    burst: str = "128kb"  # what a link lets pass at once; see docs/lab.md before you change it
    priorities: bool = False  # traffic marked with the type of service "low delay" overtakes the rest

    @property
    def num_ranks(self) -> int:
        return sum(host.ranks for host in self.hosts)

    def host_of(self, rank: int) -> int:
        ends = [sum(host.ranks for host in self.hosts[: at + 1]) for at in range(len(self.hosts))]
        return next(at for at, end in enumerate(ends) if rank < end)

    def verify(self) -> None:
        raise_if_any(_faults(self))


def parse_bits_per_second(rate: str) -> float:
    """Of "1gbit", "1.5gbit", "200mbit", "64kbit"."""
    return _number(rate, "rate", {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9})


def parse_bytes(size: str) -> int:
    return int(_number(size, "size", {"b": 1, "kb": 1024, "mb": 1024**2}))


def _number(text: str, what: str, units: dict[str, float]) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", text.strip().lower())
    if not found or found[2] not in units or not float(found[1]):
        raise UserError(f'{what} "{text}"; wanted a number and one of {", ".join(units)}, as in "1{list(units)[-1]}"')
    return float(found[1]) * units[found[2]]


def _faults(shape: Shape) -> Iterator[str]:
    if not shape.hosts:
        yield "a lab without hosts; give it at least one"
    if shape.num_ranks > MAX_RANKS:
        yield f"{shape.num_ranks} ranks; a lab has {MAX_RANKS} at most"
    yield from check_unique("rack", (rack.name for rack in shape.racks))
    named = {rack.name for rack in shape.racks}
    for number, host in enumerate(shape.hosts):
        yield from _host_faults(f"host {number}", host, named)
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


def _host_faults(subject: str, host: Host, racks: set[str]) -> Iterator[str]:
    if host.ranks < 1:
        yield f"{subject}: {host.ranks} ranks; wanted one or more"
    yield from check_non_negative(subject, cpu=host.cpu)
    if 0 < host.cpu < MIN_CPU:
        yield f"{subject}: cpu is {host.cpu}; the least that can be given is {MIN_CPU}, and 0 is no limit"
    if host.rack and host.rack not in racks:
        yield f'{subject}: no rack "{host.rack}"; racks: {", ".join(sorted(racks)) or "none"}'
