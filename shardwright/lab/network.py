"""The networks of a lab: a namespace for each rank, one for all switches, and shaped links between.

Names begin with the lab's: `NAME-r0` is rank 0's namespace and `NAME-net` that of the switches, which holds a bridge
`h0` for each host, `k0` for each rack and `core`. A link's ends are `r0` (a rank's), `u0` (a host's uplink) and `v0` (a
rack's); the second network's are `g0` (a rank's), `f0`, `w0` and `front`. A token bucket at both ends of a link shapes
both directions. Nothing of it is seen from the machine's own network.
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
NETNS_DIRECTORY = Path("/etc/netns")  # what `ip netns exec` puts in the place of files of /etc


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """What a link has carried since the lab came up."""

    link: str
    sent_bytes: int  # away from the rank, towards the core
    received_bytes: int


def namespace(lab: str, part: str) -> str:
    return f"{NAMESPACE_PREFIX}{lab}-{part}"


def rank_address(rank: int, front: bool = False) -> str:
    return f"10.{78 if front else 77}.0.{rank + 1}"


BRIDGE_FIREWALL_FILE = (
    "/proc/sys/net/bridge/bridge-nf-call-iptables"  # switches have none; ranks would be charged for its turns
)
QUEUE_BYTES = 32 << 20  # of a link: more than all that TCP keeps under way, so that nothing is ever dropped
# As in a fabric that loses nothing: a flow keeps its window, and what the host's own links probe or pace stays outside.
TCP_SETTINGS = (
    ("tcp_congestion_control", "reno"),
    ("tcp_slow_start_after_idle", "0"),
    ("tcp_wmem", "4096 65536 1048576"),
)


def create_network(lab: str, shape: Shape) -> None:
    switches = namespace(lab, "net")
    run_ip("netns", "add", switches)
    bridges = ["core", *(f"k{at}" for at in range(len(shape.racks))), *(f"h{at}" for at in range(len(shape.hosts)))]
    lines = [line for bridge in bridges for line in _bridge(bridge)]
    if any(host.front for host in shape.hosts):
        lines += _bridge("front")
    racks = {rack.name: at for at, rack in enumerate(shape.racks)}
    for at in range(len(shape.racks)):
        lines += _joined(f"v{at}", f"k{at}", f"v{at}c", "core")
    for at, host in enumerate(shape.hosts):
        lines += _joined(f"u{at}", f"h{at}", f"u{at}c", f"k{racks[host.rack]}" if host.rack else "core")
        if host.front:
            lines += [*_bridge(f"f{at}"), *_joined(f"w{at}", f"f{at}", f"w{at}c", "front")]
    _batch("ip", switches, lines)
    run_ip(
        "netns", "exec", switches, "sh", "-c", f"test ! -w {BRIDGE_FIREWALL_FILE} || echo 0 > {BRIDGE_FIREWALL_FILE}"
    )
    for rank in range(shape.num_ranks):
        _attach_rank(lab, shape, rank)
    for at, ends in _by_namespace(lab, shape).items():
        _batch("tc", at, [line for end, rate in ends for line in _shaped(end, rate, shape)])


def delete_network(lab: str) -> None:
    """Remove what there is of a lab, whole or half-made."""
    for name in list_namespaces(lab):
        run_ip("netns", "delete", name)
        shutil.rmtree(NETNS_DIRECTORY / name, ignore_errors=True)


def list_namespaces(lab: str = "") -> list[str]:
    """The namespaces of a lab, or of all labs."""
    found = json.loads(run_ip("-j", "netns", "list") or "[]")
    start = f"{NAMESPACE_PREFIX}{lab}-" if lab else NAMESPACE_PREFIX
    return sorted(one["name"] for one in found if one["name"].startswith(start))


def traffic(lab: str, shape: Shape) -> list[LinkTraffic]:
    """What each rank's link and each uplink has carried."""
    found = json.loads(run_ip("-n", namespace(lab, "net"), "-j", "-s", "link", "show"))
    counts = {one["ifname"]: one["stats64"] for one in found}
    links = [f"r{rank}" for rank in range(shape.num_ranks)]
    lines = [LinkTraffic(link, counts[link]["rx"]["bytes"], counts[link]["tx"]["bytes"]) for link in links]
    uplinks = [f"u{at}" for at in range(len(shape.hosts))] + [f"v{at}" for at in range(len(shape.racks))]
    uplinks += [f"w{at}" for at, host in enumerate(shape.hosts) if host.front]
    return lines + [LinkTraffic(link, counts[link]["tx"]["bytes"], counts[link]["rx"]["bytes"]) for link in uplinks]


def cut(lab: str, link: str, connected: bool = False) -> None:
    """Cut a link (`r0`, `u0`, `v0`, `w0`), or join it again."""
    run_ip("-n", namespace(lab, "net"), "link", "set", link, "up" if connected else "down")


def run_ip(*words: str) -> str:
    return _run(["ip", *words])


def _attach_rank(lab: str, shape: Shape, rank: int) -> None:
    """A rank's namespace, its link to its host, and its link to the second network."""
    own, switches, host = namespace(lab, f"r{rank}"), namespace(lab, "net"), shape.host_of(rank)
    run_ip("netns", "add", own)
    _name_ranks(own, shape)
    lines = ["link set lo up"]
    interfaces = [("eth0", f"r{rank}", f"h{host}", rank_address(rank))]
    if shape.hosts[host].front:
        interfaces.append(("eth1", f"g{rank}", f"f{host}", rank_address(rank, front=True)))
    for inside, outside, bridge, place in interfaces:
        run_ip("-n", switches, "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", own)
        _batch("ip", switches, [f"link set {outside} master {bridge} up"])
        lines += [f"address add {place}/16 dev {inside}", f"link set {inside} up"]
    _batch("ip", own, lines)
    for name, value in TCP_SETTINGS:
        run_ip("netns", "exec", own, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")


def _name_ranks(name: str, shape: Shape) -> None:
    """Ranks know each other by name, without a server of names to wait for."""
    lines = ["127.0.0.1 localhost"]
    for rank in range(shape.num_ranks):
        lines += [f"{rank_address(rank)} rank{rank}", f"::ffff:{rank_address(rank)} rank{rank}"]
    try:
        (NETNS_DIRECTORY / name).mkdir(parents=True, exist_ok=True)
        (NETNS_DIRECTORY / name / "hosts").write_text("\n".join(lines) + "\n")
    except PermissionError:
        return  # root of a user namespace only: names are looked up elsewhere, in vain, but addresses serve


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge", f"link set {name} up"]


def _joined(end: str, bridge: str, other_end: str, other_bridge: str) -> list[str]:
    made = f"link add {end} type veth peer name {other_end}"
    return [made, f"link set {end} master {bridge} up", f"link set {other_end} master {other_bridge} up"]


def _by_namespace(lab: str, shape: Shape) -> dict[str, list[tuple[str, str]]]:
    """The link ends to shape, with their rates, by the namespace they are in."""
    switches = namespace(lab, "net")
    found: dict[str, list[tuple[str, str]]] = {switches: []}
    for at, rack in enumerate(shape.racks):
        found[switches] += [(f"v{at}", rack.uplink), (f"v{at}c", rack.uplink)]
    for at, host in enumerate(shape.hosts):
        found[switches] += [(f"u{at}", host.uplink), (f"u{at}c", host.uplink)]
        if host.front:
            found[switches] += [(f"w{at}", host.front), (f"w{at}c", host.front)]
    for rank in range(shape.num_ranks):
        rate = shape.hosts[shape.host_of(rank)].local
        found[switches].append((f"r{rank}", rate))
        found[namespace(lab, f"r{rank}")] = [("eth0", rate)]
    return {name: [end for end in ends if end[1]] for name, ends in found.items()}


def _shaped(end: str, rate: str, shape: Shape) -> Iterator[str]:
    bits, burst = int(parse_bits_per_second(rate)), parse_bytes(shape.burst)
    if not shape.priorities:
        yield f"qdisc add dev {end} root tbf rate {bits}bit burst {burst}b limit {QUEUE_BYTES}"
        return
    whole = f"ceil {bits}bit burst {burst}b cburst {burst}b"
    yield f"qdisc add dev {end} root handle 1: htb default 20"
    yield f"class add dev {end} parent 1: classid 1:1 htb rate {bits}bit {whole}"
    yield f"class add dev {end} parent 1:1 classid 1:10 htb rate {bits * 9 // 10}bit {whole} prio 0"
    yield f"class add dev {end} parent 1:1 classid 1:20 htb rate {bits // 10}bit {whole} prio 1"
    yield f"filter add dev {end} parent 1: protocol ip u32 match ip tos 0x10 0x10 flowid 1:10"


def _batch(tool: str, name: str, lines: Sequence[str]) -> None:
    if lines:
        _run([tool, "-n", name, "-batch", "-"], "\n".join(lines) + "\n")


def _run(words: list[str], text: str = "") -> str:
    if shutil.which(words[0]) is None:
        raise UserError(f'the lab needs "{words[0]}" (Debian, Ubuntu: apt-get install iproute2)')
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        told = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise UserError(f"{' '.join(words)}: {told[0]}")
    return done.stdout
