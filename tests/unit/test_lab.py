"""The lab on this machine: links carry what they say, ranks start and end together, nothing stays behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.errors import UserError
from shardwright.lab import cpu_quota, emulated_cluster, launch, network
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Rack, Shape, parse_bits_per_second, parse_bytes
from shardwright.spec import files

NAME = f"test{os.getpid() % 100_000}"
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="a lab that stays up needs root and iproute2"
)
# Every rank but 0 sends `megabytes` to rank 0 over the first or second network; rank 0 says the bytes and seconds.
SEND = """
import os, socket, sys, time
megabytes, place, mark = int(sys.argv[1]), sys.argv[2], len(sys.argv) > 3
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:
    server = socket.create_server((place, 5000))
    peers = [server.accept()[0] for _ in range(world - 1)]
    total, start = 0, time.perf_counter()
    for peer in peers:
        while found := peer.recv(1 << 20):
            total += len(found)
    print(total, time.perf_counter() - start)
else:
    for _ in range(200):
        try:
            peer = socket.create_connection((place, 5000))
            break
        except OSError:
            time.sleep(0.02)
    peer.sendall(bytes(megabytes * 1_000_000))
    peer.close()
"""


class Said(list):
    def __call__(self, rank: int, line: str) -> None:
        self.append((rank, line))


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    emulated_cluster.remove_lab(NAME)


def python(text: str, *words: str) -> list[str]:
    return [sys.executable, "-c", text, *words]


def sent(lab: Lab, megabytes: int, place: str = "10.77.0.1") -> tuple[int, float]:
    """Bytes and seconds, as rank 0 saw them."""
    said = Said()
    ended = lab.run(python(SEND, str(megabytes), place), said, timeout_seconds=60)
    assert ended.rank is None, said
    total, seconds = said[0][1].split()
    return int(total), float(seconds)


def test_rates_and_sizes():
    assert parse_bits_per_second("1.5gbit") == 1.5e9 and parse_bits_per_second("64kbit") == 64_000
    assert parse_bytes("128kb") == 131_072
    for wrong in ("1", "gbit", "1gbyte", "0mbit", "-1mbit", "1 gbit gbit"):
        with pytest.raises(UserError, match='wanted a number and one of kbit, mbit, gbit, as in "1gbit"'):
            parse_bits_per_second(wrong)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (Shape(), "without hosts"),
        (Shape((Host(ranks=0),)), "host 0: 0 ranks"),
        (Shape((Host(ranks=251),)), "251 ranks; a lab has 250 at most"),
        (Shape((Host(uplink="fast"),)), 'rate "fast"'),
        (Shape((Host(rack="a"),), (Rack("b"),)), 'host 0: no rack "a"; racks: b'),
        (Shape((Host(cpu=-1.0),)), "cpu is -1"),
        (Shape((Host(cpu=0.02),)), "cpu is 0.02; the least that can be given is 0.05"),
        (Shape((Host(),), burst="1"), "burst"),
        (Shape((Host(),), (Rack("a"), Rack("a"))), 'rack "a" appears 2 times'),
    ],
)
def test_shapes_that_cannot_be(shape, told):
    with pytest.raises(UserError, match=re.escape(told)):
        Lab(shape, NAME)
    assert network.list_namespaces(NAME) == []


def test_names_that_cannot_be():
    with pytest.raises(UserError, match="small letters"):
        Lab(Shape((Host(),)), "a-b")


def test_every_rank_is_told_what_torchrun_tells():
    from shardwright.lab.launch import rank_environment

    shape = Shape((Host(ranks=2), Host(ranks=3)))
    told = rank_environment(shape, 3)
    assert (told["RANK"], told["LOCAL_RANK"], told["GROUP_RANK"]) == ("3", "1", "1")
    assert (told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"], told["GROUP_WORLD_SIZE"]) == ("5", "3", "2")
    assert "SHARDWRIGHT_MEMORY" not in told
    assert rank_environment(Shape((Host(local="8gbit"),)), 0)["SHARDWRIGHT_MEMORY"] == "0"


@needs_root
def test_links_carry_what_is_sent_at_their_rate():
    with Lab(Shape((Host(uplink="100mbit"), Host(uplink="1gbit"))), NAME) as lab:
        before = {line.link: line for line in lab.traffic()}
        total, seconds = sent(lab, 5)
        assert total == 5_000_000
        assert 0.3 < seconds < 1.0, "5 MB at 100 Mbit/s take 0.4 s, less what a burst lets pass"
        after = {line.link: line for line in lab.traffic()}
        for link, way in (
            ("r1", "sent_bytes"),
            ("u1", "sent_bytes"),
            ("u0", "received_bytes"),
            ("r0", "received_bytes"),
        ):
            carried = getattr(after[link], way) - getattr(before[link], way)
            assert total <= carried < 1.05 * total, (link, carried)
    assert NAME not in emulated_cluster.list_labs()


@needs_root
def test_two_tiers_of_uplinks_and_a_second_network():
    racks = (Rack("a", "40mbit"), Rack("b", "1gbit"))
    hosts = tuple(Host(uplink="1gbit", front="80mbit", rack=rack) for rack in ("a", "a", "b"))
    with Lab(Shape(hosts, racks), NAME) as lab:
        total, seconds = sent(lab, 2)
        assert total == 4_000_000
        assert 0.3 < seconds < 1.0, "2 MB cross the rack's 40 Mbit/s, 2 MB do not"
        first = {line.link: line.received_bytes for line in lab.traffic()}
        assert 2_000_000 < first["v0"] < 2_200_000 and first["w0"] < 10_000
        total, seconds = sent(lab, 2, network.rank_address(0, front=True))
        assert 0.3 < seconds < 1.0, "4 MB over the host's 80 Mbit/s of the second network"
        now = {line.link: line.received_bytes for line in lab.traffic()}
        assert now["w0"] > 4_000_000 and now["v0"] - first["v0"] < 10_000


OVERTAKE = """
import os, socket, time
rank = int(os.environ["RANK"])
if rank == 0:
    server = socket.create_server(("10.77.0.1", 5000))
    peers = [server.accept()[0] for _ in range(2)]
    for peer in peers:
        peer.setblocking(False)
    ends = {}
    while len(ends) < 2:
        for at, peer in enumerate(peers):
            try:
                if at not in ends and not peer.recv(1 << 20):
                    ends[at] = time.perf_counter()
            except BlockingIOError:
                pass
    kinds = ["urgent" if peer.getpeername()[1] == 6001 else "bulk" for peer in peers]
    print(*sorted(kinds, key=lambda kind: ends[kinds.index(kind)]))
elif rank == 1:
    time.sleep(0.3)
    bulk, urgent = socket.socket(), socket.socket()
    urgent.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x10)
    urgent.bind(("10.77.0.2", 6001))
    for one in (bulk, urgent):
        one.connect(("10.77.0.1", 5000))
    bulk.setblocking(False)
    left = [bytes(3_000_000), bytes(3_000_000)]
    while any(left):
        for at, one in enumerate((bulk, urgent)):
            one.setblocking(False)
            try:
                left[at] = left[at][one.send(left[at][: 1 << 16]) :] if left[at] else left[at]
                if not left[at]:
                    one.shutdown(socket.SHUT_WR)
                    left[at] = b""
            except (BlockingIOError, OSError):
                pass
"""


@needs_root
def test_marked_traffic_overtakes():
    with Lab(Shape((Host(uplink="50mbit"),) * 2, priorities=True), NAME) as lab:
        said = Said()
        assert lab.run(python(OVERTAKE), said, timeout_seconds=30).rank is None, said
        assert said == [(0, "urgent bulk")]


@needs_root
def test_a_link_is_cut_and_joined():
    with Lab(Shape((Host(), Host())), NAME) as lab:
        lab.cut("u1")
        said = Said()
        assert lab.run(python(SEND, "1", "10.77.0.1"), said, timeout_seconds=1).status == 124
        lab.cut("u1", connected=True)
        assert sent(lab, 1)[0] == 1_000_000


def throttled_seconds(rank: int) -> float:
    """How long a rank was stopped by its CPU quota."""
    text = (cpu_quota.group_path(NAME, rank) / "cpu.stat").read_text()
    values = dict(line.split() for line in text.splitlines())
    return int(values["throttled_time"]) / 1e9 if "throttled_time" in values else int(values["throttled_usec"]) / 1e6


@needs_root
def test_a_quota_holds():
    spin = "import time\nstart, cpu = time.time(), time.process_time()\n"
    spin += "while time.time() < start + 1: pass\nprint(time.process_time() - cpu)"
    with Lab(Shape((Host(cpu=0.25), Host())), NAME) as lab:
        said = Said()
        assert lab.run(python(spin), said).rank is None
        used = {rank: float(line) for rank, line in said}
        assert used[0] < 0.35 and used[1] > used[0]
        assert throttled_seconds(0) > 0.2 and throttled_seconds(1) == 0


@needs_root
def test_the_first_rank_that_fails_ends_all():
    fail = "import os, sys, time\nprint('here', flush=True)\nprint('no end of line', end='', flush=True)\n"
    fail += "if os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)"
    with Lab(Shape((Host(ranks=3),)), NAME) as lab:
        said, start = Said(), time.monotonic()
        ended = lab.run(python(fail), said)
        assert (ended.rank, ended.status) == (1, 7) and time.monotonic() - start < 10
        assert (1, "here") in said and (1, "no end of line") in said


@needs_root
def test_a_run_ends_in_time_whatever_its_ranks_do():
    with Lab(Shape((Host(),)), NAME) as lab:
        start = time.monotonic()
        assert lab.run(["yes"], Said(), timeout_seconds=0.5).timed_out
        assert lab.run(["sh", "-c", "sleep 60 & exit 0"], Said(), timeout_seconds=20).rank is None
        assert time.monotonic() - start < 15


@needs_root
def test_last_words_are_passed_on():
    words = "import signal, sys, time\nsignal.signal(15, lambda *_: (print('told to end', end=''), sys.exit(0)))\n"
    words += "print('here', flush=True)\ntime.sleep(60)"
    with Lab(Shape((Host(),)), NAME) as lab:
        said = Said()
        assert lab.run(python(words), said, timeout_seconds=1).status == 124
        assert said == [(0, "here"), (0, "told to end")]


@needs_root
def test_what_is_left_of_a_lab_hides_no_other():
    emulated_cluster.STATE_DIRECTORY.mkdir(parents=True, exist_ok=True)
    files.write(Shape((Host(),)), emulated_cluster.STATE_DIRECTORY / f"{NAME}.json")
    done = CliRunner().invoke(app, ["lab", "status"])
    assert done.exit_code == 0 and f'lab "{NAME}": left behind' in done.output


@needs_root
def test_a_command_that_is_not_there_is_told():
    with Lab(Shape((Host(),)), NAME) as lab:
        said = Said()
        ended = lab.run(["no-such-command"], said)
        assert ended.rank == 0 and ended.status and "no-such-command" in said[0][1]


@needs_root
def test_half_a_lab_goes_away(monkeypatch):
    def fails(*_):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(network, "_attach_rank", fails)
    with pytest.raises(RuntimeError):
        Lab(Shape((Host(), Host())), NAME).start()
    assert NAME not in emulated_cluster.list_labs()


def test_ranks_get_the_core_that_has_least_to_do():
    shape = Shape((Host(ranks=2, cpu=0.66), Host(cpu=0.3), Host(cpu=0.3)))
    assert launch.assign_cores(shape, [4, 7]) == [4, 7, 4, 7]
    assert launch.assign_cores(Shape((Host(cpu=0.9), Host(ranks=3, cpu=0.3))), [0, 1]) == [0, 1, 1, 1]


def test_quotas_that_a_core_cannot_give_are_refused():
    launch.check_quotas(Shape((Host(ranks=2, cpu=0.5), Host(cpu=0.5), Host(cpu=0.5))), [0, 1])
    launch.check_quotas(Shape((Host(cpu=0.6), Host(cpu=0.6), Host(), Host(cpu=1.5))), [0, 1])
    with pytest.raises(UserError, match=r"ranks 0, 2 sum to 1\.2 of core 4.*at most 0\.5"):
        launch.check_quotas(Shape((Host(cpu=0.6),) * 3), [4, 7])
    with pytest.raises(UserError, match=r"ranks 0, 1, 2 sum to 1\.02 of core 0.*at most 0\.33"):
        launch.check_quotas(Shape((Host(ranks=3, cpu=0.34),)), [0])


@needs_root
def test_ranks_with_a_quota_keep_to_a_core_and_links_drop_nothing():
    said = Said()
    look = "grep Cpus_allowed_list /proc/self/status; cat /proc/sys/net/ipv4/tcp_congestion_control; "
    with Lab(Shape((Host(ranks=2, uplink="200mbit", cpu=0.4),) * 2), NAME) as lab:
        assert lab.run(["sh", "-c", f'{look} echo "$SHARDWRIGHT_LAB $SHARDWRIGHT_LAB_CPU"'], said).rank is None
        assert lab.run([sys.executable, "-c", SEND, "4", network.rank_address(0)]).rank is None
        links = subprocess.run(
            ["tc", "-n", network.namespace(NAME, "net"), "-s", "-j", "qdisc", "show"], capture_output=True, check=True
        )
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(4):
        lines = [line for said_by, line in said if said_by == rank]
        assert lines == [f"Cpus_allowed_list:\t{cores[rank % len(cores)]}", "reno", f"{NAME} 0.4"]
    shaped = [link for link in json.loads(links.stdout) if link["kind"] == "tbf"]
    assert len(shaped) == 4 and sum(link["bytes"] for link in shaped) > 8e6
    assert sum(link["drops"] for link in shaped) == 0


def left_behind(name: str) -> list[str]:
    """Namespaces, groups, files and processes of a lab."""
    found = [*network.list_namespaces(name), *(str(path) for path in network.NETNS_DIRECTORY.glob(f"*{name}*"))]
    found += [one for one in cpu_quota.labs_with_groups() if one == name]
    found += [str(path) for path in emulated_cluster.STATE_DIRECTORY.glob(f"{name}*")]
    return found + [str(place) for place in processes(name)]


def processes(name: str) -> list[Path]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [entry.parent] if f"LAB_TEST={name}".encode() in entry.read_bytes().split(b"\0") else []
    return found


def sleepers(name: str) -> list[Path]:
    """A shell that has started `sleep` is one from the moment its command line says so; it may also be gone by then."""
    found = []
    for place in processes(name):
        with suppress(OSError):
            found += [place] if b"sleep" in (place / "cmdline").read_bytes() else []
    return found


def kill_in_the_middle(folder: Path, name: str, seconds: float | None) -> None:
    """After so many seconds, or when the ranks are seen to run."""
    files.write(Shape((Host(ranks=2, uplink="1gbit", cpu=0.5),) * 2), folder / "shape.toml")
    words = ["-m", "shardwright.cli", "lab", "run", "--name", name, "--shape", str(folder / "shape.toml"), "--"]
    caller = subprocess.Popen(
        [sys.executable, *words, "sh", "-c", "sleep 100 & sleep 100"],
        env=os.environ | {"LAB_TEST": name},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if seconds is None:
        while len(sleepers(name)) < 8:
            assert caller.poll() is None
            time.sleep(0.05)
        assert len(left_behind(name)) > 8
    else:
        time.sleep(seconds)
    caller.send_signal(signal.SIGKILL)
    caller.wait()


@needs_root
@pytest.mark.fault
@pytest.mark.parametrize("seconds", [0.6, None, *[pytest.param(0.2 * at, marks=pytest.mark.slow) for at in range(10)]])
def test_what_a_killed_caller_left_is_found_by_name_and_removed(tmp_path, seconds):
    kill_in_the_middle(tmp_path, NAME, seconds)
    if seconds is None:
        assert left_behind(NAME)
    done = CliRunner().invoke(
        app, ["lab", "down", "--name", NAME] if NAME in emulated_cluster.list_labs() else ["lab", "status"]
    )
    assert done.exit_code == 0, done.output
    assert left_behind(NAME) == []


@needs_root
@pytest.mark.slow
def test_ten_times_up_and_down_leaves_nothing():
    for _ in range(10):
        with Lab(Shape((Host(ranks=2, uplink="1gbit", cpu=0.5, front="1gbit"),) * 2), NAME) as lab:
            assert lab.run(["true"], Said()).rank is None
        assert left_behind(NAME) == []


@needs_root
def test_the_commands(tmp_path):
    def run(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["lab", *words])
        assert done.exit_code == code, done.output
        return done.output

    assert "2 hosts, 4 ranks" in run("up", "--hosts", "2", "--ranks", "2", "--uplink", "1gbit", "--name", NAME)
    assert f'lab "{NAME}": 2 hosts, 4 ranks' in run("status")
    with pytest.raises(UserError, match="is up already"):
        CliRunner().invoke(app, ["lab", "up", "--name", NAME], catch_exceptions=False)
    done = subprocess.run(
        [sys.executable, "-m", "shardwright.cli", "lab", "run", "--name", NAME, "--", "sh", "-c", "exit $RANK"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 1 <= done.returncode <= 3 and "all ranks were ended" in done.stderr
    run("down", "--name", NAME)
    with pytest.raises(UserError, match=f'no lab "{NAME}" is up'):
        CliRunner().invoke(app, ["lab", "down", "--name", NAME], catch_exceptions=False)
