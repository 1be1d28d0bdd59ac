"""The networks of a lab: a namespace for each rank, one for all switches, and links with a rate.

Names of namespaces begin with the lab's name: `NAME-r0` is that of rank 0, and `NAME-net` that of the switches, with a
bridge `h0` for each host, `k0` for each rack, and `core`. Links are `r0` (of a rank), `u0` (uplink of a host) and `v0`
(uplink of a rack); the second network has links `g0` (of a rank) and `w0` (of a host), and bridges `f0` (of a host) and
`front`. A token bucket at each end of a link limits both directions. The machine's own network sees nothing of this.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import UserError
from shardwright.lab.shape import Shape, parse_bits_per_second, parse_bytes

NAMESPACE_PREFIX = "shardwright-"
NETNS_DIRECTORY = Path("/etc/netns")  # files that `ip netns exec` mounts over those in /etc


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """The bytes that a link has carried since the lab is up."""

    link: str
    sent_bytes: int  # away from the rank, towards the core
    received_bytes: int


def namespace(lab: str, part: str) -> str:
    return f"{NAMESPACE_PREFIX}{lab}-{part}"


def rank_address(rank: int, front: bool = False) -> str:
    return f"10.{78 if front else 77}.0.{rank + 1}"


BRIDGE_FIREWALL_FILE = (
    "/proc/sys/net/bridge/bridge-nf-call-iptables"  # switches have no firewall; its time would count as the ranks'
)
QUEUE_BYTES = 32 << 20  # of a link: more than all that TCP keeps in flight, so that nothing is ever dropped
# As in a lossless fabric: a flow keeps its window, without the probing or pacing of the machine's own TCP settings.
TCP_SETTINGS = (
    ("tcp_congestion_control", "reno"),
    ("tcp_slow_start_after_idle", "0"),
    ("tcp_wmem", "4096 65536 1048576"),
)


def create_network(lab: str, shape: Shape) -> None:
    """Create the namespaces, bridges and links of a lab; fails if they exist."""
    switches = namespace(lab, "net")
    run_ip("netns", "add", switches)
    bridges = ["core", *(f"k{i}" for i in range(len(shape.racks))), *(f"h{i}" for i in range(len(shape.hosts)))]
    lines = [line for bridge in bridges for line in _add_bridge(bridge)]
    if any(host.front for host in shape.hosts):
        lines += _add_bridge("front")
    racks = {rack.name: index for index, rack in enumerate(shape.racks)}
    for index in range(len(shape.racks)):
        lines += _link_bridges(f"v{index}", f"k{index}", f"v{index}c", "core")
    for index, host in enumerate(shape.hosts):
        lines += _link_bridges(f"u{index}", f"h{index}", f"u{index}c", f"k{racks[host.rack]}" if host.rack else "core")
        if host.front:
            lines += [*_add_bridge(f"f{index}"), *_link_bridges(f"w{index}", f"f{index}", f"w{index}c", "front")]
    _run_batch("ip", switches, lines)
    run_ip(
        "netns", "exec", switches, "sh", "-c", f"test ! -w {BRIDGE_FIREWALL_FILE} || echo 0 > {BRIDGE_FIREWALL_FILE}"
    )
    for rank in range(shape.num_ranks):
        _attach_rank(lab, shape, rank)
    for name, ends in _link_ends(lab, shape).items():
        _run_batch("tc", name, [line for end, rate in ends for line in _shape_link(end, rate, shape)])


def delete_network(lab: str) -> None:
    """Delete all namespaces of a lab, also of an incomplete one."""
    for name in list_namespaces(lab):
        run_ip("netns", "delete", name)
        shutil.rmtree(NETNS_DIRECTORY / name, ignore_errors=True)


def list_namespaces(lab: str = "") -> list[str]:
    """The namespaces of a lab, or of all labs."""
    namespaces = json.loads(run_ip("-j", "netns", "list") or "[]")
    prefix = f"{NAMESPACE_PREFIX}{lab}-" if lab else NAMESPACE_PREFIX
    return sorted(entry["name"] for entry in namespaces if entry["name"].startswith(prefix))


def traffic(lab: str, shape: Shape) -> list[LinkTraffic]:
    """The bytes that each rank's link and each uplink has carried."""
    entries = json.loads(run_ip("-n", namespace(lab, "net"), "-j", "-s", "link", "show"))
    counts = {entry["ifname"]: entry["stats64"] for entry in entries}
    links = [f"r{rank}" for rank in range(shape.num_ranks)]
    lines = [LinkTraffic(link, counts[link]["rx"]["bytes"], counts[link]["tx"]["bytes"]) for link in links]
    uplinks = [f"u{index}" for index in range(len(shape.hosts))] + [f"v{index}" for index in range(len(shape.racks))]
    uplinks += [f"w{index}" for index, host in enumerate(shape.hosts) if host.front]
    return lines + [LinkTraffic(link, counts[link]["tx"]["bytes"], counts[link]["rx"]["bytes"]) for link in uplinks]


def cut(lab: str, link: str, connected: bool = False) -> None:
    """Cut a link (`r0`, `u0`, `v0`, `w0`), or connect it again."""
    run_ip("-n", namespace(lab, "net"), "link", "set", link, "up" if connected else "down")


def set_uplinks(lab: str, shape: Shape, rate: str, hosts: Sequence[int]) -> None:
    """Change the rate of the uplinks of hosts, which the shape limits."""
    if free := [index for index in hosts if not shape.hosts[index].uplink]:
        raise UserError(f"the uplink of host {free[0]} has no rate to change: create the lab with one")
    ends = [end for index in hosts for end in (f"u{index}", f"u{index}c")]
    lines = [line for end in ends for line in _set_rate(end, rate, shape, "change")]
    _run_batch("tc", namespace(lab, "net"), lines)


def run_ip(*words: str) -> str:
    return _run(["ip", *words])


def _attach_rank(lab: str, shape: Shape, rank: int) -> None:
    """Create a rank's namespace, its link to its host, and its link to the second network."""
    rank_namespace, switches, host = namespace(lab, f"r{rank}"), namespace(lab, "net"), shape.host_of(rank)
    run_ip("netns", "add", rank_namespace)
    _write_hosts_file(rank_namespace, shape)
    lines = ["link set lo up"]
    interfaces = [("eth0", f"r{rank}", f"h{host}", rank_address(rank))]
    if shape.hosts[host].front:
        interfaces.append(("eth1", f"g{rank}", f"f{host}", rank_address(rank, front=True)))
    for inside, outside, bridge, address in interfaces:
        run_ip("-n", switches, "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", rank_namespace)
        _run_batch("ip", switches, [f"link set {outside} master {bridge} up"])
        lines += [f"address add {address}/16 dev {inside}", f"link set {inside} up"]
    _run_batch("ip", rank_namespace, lines)
    for name, value in TCP_SETTINGS:
        run_ip("netns", "exec", rank_namespace, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")


def _write_hosts_file(name: str, shape: Shape) -> None:
    """Write the hosts file of a namespace: names of ranks then resolve without waiting for DNS."""
    lines = ["127.0.0.1 localhost"]
    for rank in range(shape.num_ranks):
        lines += [f"{rank_address(rank)} rank{rank}", f"::ffff:{rank_address(rank)} rank{rank}"]
    try:
        (NETNS_DIRECTORY / name).mkdir(parents=True, exist_ok=True)
        (NETNS_DIRECTORY / name / "hosts").write_text("\n".join(lines) + "\n")
    except PermissionError:
        return  # root of a user namespace may not write there: names do not resolve, but addresses work


def _add_bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge", f"link set {name} up"]


def _link_bridges(end: str, bridge: str, other_end: str, other_bridge: str) -> list[str]:
    """`ip` commands that connect two bridges by a link."""
    add_link = f"link add {end} type veth peer name {other_end}"
    return [add_link, f"link set {end} master {bridge} up", f"link set {other_end} master {other_bridge} up"]


def _link_ends(lab: str, shape: Shape) -> dict[str, list[tuple[str, str]]]:
    """The link ends with a rate, as (name, rate), by namespace."""
    switches = namespace(lab, "net")
    ends_by_namespace: dict[str, list[tuple[str, str]]] = {switches: []}
    for index, rack in enumerate(shape.racks):
        ends_by_namespace[switches] += [(f"v{index}", rack.uplink), (f"v{index}c", rack.uplink)]
    for index, host in enumerate(shape.hosts):
        ends_by_namespace[switches] += [(f"u{index}", host.uplink), (f"u{index}c", host.uplink)]
        if host.front:
            ends_by_namespace[switches] += [(f"w{index}", host.front), (f"w{index}c", host.front)]
    for rank in range(shape.num_ranks):
        rate = shape.hosts[shape.host_of(rank)].local
        ends_by_namespace[switches].append((f"r{rank}", rate))
        ends_by_namespace[namespace(lab, f"r{rank}")] = [("eth0", rate)]
    return {name: [end for end in ends if end[1]] for name, ends in ends_by_namespace.items()}


def _shape_link(end: str, rate: str, shape: Shape) -> Iterator[str]:
    """`tc` commands that limit what one end of a link sends."""
    if not shape.priorities:
        yield from _set_rate(end, rate, shape, "add")
        return
    yield f"qdisc add dev {end} root handle 1: htb default 20"
    yield from _set_rate(end, rate, shape, "add")
    yield f"filter add dev {end} parent 1: protocol ip u32 match ip tos 0x10 0x10 flowid 1:10"


def _set_rate(end: str, rate: str, shape: Shape, verb: str) -> Iterator[str]:
    """`tc` commands that set what one end of a link may send; `verb`: add or change."""
    bits, burst = int(parse_bits_per_second(rate)), parse_bytes(shape.burst)
    if not shape.priorities:
        yield f"qdisc {verb} dev {end} root tbf rate {bits}bit burst {burst}b limit {QUEUE_BYTES}"
        return
    ceiling = f"ceil {bits}bit burst {burst}b cburst {burst}b"
    yield f"class {verb} dev {end} parent 1: classid 1:1 htb rate {bits}bit {ceiling}"
    yield f"class {verb} dev {end} parent 1:1 classid 1:10 htb rate {bits * 9 // 10}bit {ceiling} prio 0"
    yield f"class {verb} dev {end} parent 1:1 classid 1:20 htb rate {bits // 10}bit {ceiling} prio 1"


def _run_batch(tool: str, name: str, lines: Sequence[str]) -> None:
    if lines:
        _run([tool, "-n", name, "-batch", "-"], "\n".join(lines) + "\n")


def _run(command: list[str], text: str = "") -> str:
    if shutil.which(command[0]) is None:
        raise UserError(f'the lab needs "{command[0]}" (Debian, Ubuntu: apt-get install iproute2)')
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        error_lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        raise UserError(f"{' '.join(command)}: {error_lines[0]}")
    return result.stdout
