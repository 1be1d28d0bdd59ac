"""The lab on this machine: link rates, ranks that start and end together, and cleanup."""

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
# Every rank but 0 sends `megabytes` to rank 0 at `address`, on either network; rank 0 prints the bytes and seconds.
SEND = """
import os, socket, sys, time
megabytes, address = int(sys.argv[1]), sys.argv[2]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:
    server = socket.create_server((address, 5000))
    peers = [server.accept()[0] for _ in range(world - 1)]
    total, start = 0, time.perf_counter()
    for peer in peers:
        while data := peer.recv(1 << 20):
            total += len(data)
    print(total, time.perf_counter() - start)
else:
    for _ in range(200):
        try:
            peer = socket.create_connection((address, 5000))
            break
        except OSError:
            time.sleep(0.02)
    peer.sendall(bytes(megabytes * 1_000_000))
    peer.close()
"""


class OutputLines(list):
    """(rank, line) pairs of a lab run's output."""

    def __call__(self, rank: int, line: str) -> None:
        self.append((rank, line))


@pytest.fixture(autouse=True)
def remove_lab():
    yield
    emulated_cluster.remove_lab(NAME)


def python_command(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def measure_transfer(lab: Lab, megabytes: int, address: str = "10.77.0.1") -> tuple[int, float]:
    """Send from every other rank to rank 0; the bytes and seconds that rank 0 measured."""
    output = OutputLines()
    result = lab.run(python_command(SEND, str(megabytes), address), output, timeout_seconds=60)
    assert result.rank is None, output
    total, seconds = output[0][1].split()
    return int(total), float(seconds)


def test_parse_rates_and_sizes():
    assert parse_bits_per_second("1.5gbit") == 1.5e9 and parse_bits_per_second("64kbit") == 64_000
    assert parse_bytes("128kb") == 131_072
    for wrong in ("1", "gbit", "1gbyte", "0mbit", "-1mbit", "1 gbit gbit"):
        with pytest.raises(UserError, match='wanted a number and one of kbit, mbit, gbit, as in "1gbit"'):
            parse_bits_per_second(wrong)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(), "without hosts"),
        (Shape((Host(ranks=0),)), "host 0: 0 ranks"),
        (Shape((Host(ranks=251),)), "a lab of 251 ranks; the maximum is 250"),
        (Shape((Host(uplink="fast"),)), 'rate "fast"'),
        (Shape((Host(rack="a"),), (Rack("b"),)), 'host 0: no rack "a"; racks: b'),
        (Shape((Host(cpu=-1.0),)), "cpu is -1"),
        (Shape((Host(cpu=0.02),)), "cpu is 0.02; the minimum is 0.05"),
        (Shape((Host(),), burst="1"), "burst"),
        (Shape((Host(),), (Rack("a"), Rack("a"))), 'rack "a" appears 2 times'),
    ],
)
def test_errors_in_shapes(shape, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Lab(shape, NAME)
    assert network.list_namespaces(NAME) == []


def test_lab_names_have_small_letters():
    with pytest.raises(UserError, match="lowercase letters"):
        Lab(Shape((Host(),)), "a-b")


def test_ranks_have_the_environment_of_torchrun():
    from shardwright.lab.launch import lab_environment, rank_environment

    shape = Shape((Host(ranks=2), Host(ranks=3)))
    env = rank_environment(shape, 3)
    assert (env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"]) == ("3", "1", "1")
    assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_WORLD_SIZE"]) == ("5", "3", "2")
    assert lab_environment("mine", Host()) == {"SHARDWRIGHT_LAB": "mine"}
    lab = {"SHARDWRIGHT_LAB": "mine", "SHARDWRIGHT_LAB_CPU": "0.45", "SHARDWRIGHT_LAB_LINK": "8gbit"}
    assert lab_environment("mine", Host(cpu=0.45, local="8gbit")) == lab


@needs_root
def test_links_transfer_at_their_rate():
    with Lab(Shape((Host(uplink="100mbit"), Host(uplink="1gbit"))), NAME) as lab:
        before = {line.link: line for line in lab.traffic()}
        total, seconds = measure_transfer(lab, 5)
        assert total == 5_000_000
        assert 0.3 < seconds < 1.0, "5 MB at 100 Mbit/s take 0.4 s, a little less with a burst"
        after = {line.link: line for line in lab.traffic()}
        for link, direction in (
            ("r1", "sent_bytes"),
            ("u1", "sent_bytes"),
            ("u0", "received_bytes"),
            ("r0", "received_bytes"),
        ):
            num_bytes = getattr(after[link], direction) - getattr(before[link], direction)
            assert total <= num_bytes < 1.05 * total, (link, num_bytes)
    assert NAME not in emulated_cluster.list_labs()


@needs_root
def test_rack_uplinks_and_the_second_network_have_their_rates():
    racks = (Rack("a", "40mbit"), Rack("b", "1gbit"))
    hosts = tuple(Host(uplink="1gbit", front="80mbit", rack=rack) for rack in ("a", "a", "b"))
    with Lab(Shape(hosts, racks), NAME) as lab:
        total, seconds = measure_transfer(lab, 2)
        assert total == 4_000_000
        assert 0.3 < seconds < 1.0, "2 of 4 MB cross the rack's uplink of 40 Mbit/s"
        before = {line.link: line.received_bytes for line in lab.traffic()}
        assert 2_000_000 < before["v0"] < 2_200_000 and before["w0"] < 10_000
        total, seconds = measure_transfer(lab, 2, network.rank_address(0, front=True))
        assert 0.3 < seconds < 1.0, "4 MB cross the host's uplink of 80 Mbit/s in the second network"
        after = {line.link: line.received_bytes for line in lab.traffic()}
        assert after["w0"] > 4_000_000 and after["v0"] - before["v0"] < 10_000


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
        for i, peer in enumerate(peers):
            try:
                if i not in ends and not peer.recv(1 << 20):
                    ends[i] = time.perf_counter()
            except BlockingIOError:
                pass
    kinds = ["urgent" if peer.getpeername()[1] == 6001 else "bulk" for peer in peers]
    print(*sorted(kinds, key=lambda kind: ends[kinds.index(kind)]))
elif rank == 1:
    time.sleep(0.3)
    bulk, urgent = socket.socket(), socket.socket()
    urgent.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x10)
    urgent.bind(("10.77.0.2", 6001))
    for peer in (bulk, urgent):
        peer.connect(("10.77.0.1", 5000))
    bulk.setblocking(False)
    unsent = [bytes(3_000_000), bytes(3_000_000)]
    while any(unsent):
        for i, peer in enumerate((bulk, urgent)):
            peer.setblocking(False)
            try:
                unsent[i] = unsent[i][peer.send(unsent[i][: 1 << 16]) :] if unsent[i] else unsent[i]
                if not unsent[i]:
                    peer.shutdown(socket.SHUT_WR)
                    unsent[i] = b""
            except (BlockingIOError, OSError):
                pass
"""


@needs_root
def test_priority_traffic_overtakes():
    with Lab(Shape((Host(uplink="50mbit"),) * 2, priorities=True), NAME) as lab:
        output = OutputLines()
        assert lab.run(python_command(OVERTAKE), output, timeout_seconds=30).rank is None, output
        assert output == [(0, "urgent bulk")]


@needs_root
def test_a_link_is_cut_and_reconnected():
    with Lab(Shape((Host(), Host())), NAME) as lab:
        lab.cut("u1")
        output = OutputLines()
        assert lab.run(python_command(SEND, "1", "10.77.0.1"), output, timeout_seconds=1).status == 124
        lab.cut("u1", connected=True)
        assert measure_transfer(lab, 1)[0] == 1_000_000


@needs_root
@pytest.mark.parametrize("priorities", (False, True))
def test_the_rate_of_uplinks_changes(priorities):
    with Lab(Shape((Host(uplink="10gbit"),) * 2, priorities=priorities), NAME) as lab:
        fast = measure_transfer(lab, 1)[1]
        lab.set_uplinks("20mbit")
        assert 0.3 < measure_transfer(lab, 1)[1] < 1.5, "1 MB, of which 128 kB at once"
        lab.set_uplinks("10gbit")
        assert max(fast, measure_transfer(lab, 1)[1]) < 0.25
    with Lab(Shape((Host(),) * 2), NAME) as lab, pytest.raises(UserError, match="create the lab with one"):
        lab.set_uplinks("20mbit")


def throttled_seconds(rank: int) -> float:
    """Seconds for which a CPU quota stopped a rank."""
    text = (cpu_quota.group_path(NAME, rank) / "cpu.stat").read_text()
    values = dict(line.split() for line in text.splitlines())
    return int(values["throttled_time"]) / 1e9 if "throttled_time" in values else int(values["throttled_usec"]) / 1e6


@needs_root
def test_cpu_quotas_limit_ranks():
    spin = "import time\nstart, cpu = time.time(), time.process_time()\n"
    spin += "while time.time() < start + 1: pass\nprint(time.process_time() - cpu)"
    with Lab(Shape((Host(cpu=0.25), Host(), Host(cpu=0.05))), NAME) as lab:
        output = OutputLines()
        assert lab.run(python_command(spin), output).rank is None
        used = {rank: float(line) for rank, line in output}
        assert used[0] < 0.35 and used[1] > used[0] > used[2] and used[2] < 0.15
        assert throttled_seconds(0) > 0.2 and throttled_seconds(1) == 0


@needs_root
def test_the_first_rank_that_fails_ends_all_ranks():
    fail = "import os, sys, time\nprint('here', flush=True)\nprint('no end of line', end='', flush=True)\n"
    fail += "if os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)"
    with Lab(Shape((Host(ranks=3),)), NAME) as lab:
        output, start = OutputLines(), time.monotonic()
        result = lab.run(python_command(fail), output)
        assert (result.rank, result.status) == (1, 7) and time.monotonic() - start < 10
        assert (1, "here") in output and (1, "no end of line") in output


@needs_root
def test_a_run_ends_at_its_timeout_or_when_its_commands_exit():
    with Lab(Shape((Host(),)), NAME) as lab:
        start = time.monotonic()
        assert lab.run(["yes"], OutputLines(), timeout_seconds=0.5).timed_out
        assert lab.run(["sh", "-c", "sleep 60 & exit 0"], OutputLines(), timeout_seconds=20).rank is None
        assert time.monotonic() - start < 15


@needs_root
def test_output_after_sigterm_is_passed_on():
    program = "import signal, sys, time\nsignal.signal(15, lambda *_: (print('SIGTERM', end=''), sys.exit(0)))\n"
    program += "print('here', flush=True)\ntime.sleep(60)"
    with Lab(Shape((Host(),)), NAME) as lab:
        output = OutputLines()
        assert lab.run(python_command(program), output, timeout_seconds=1).status == 124
        assert output == [(0, "here"), (0, "SIGTERM")]


@needs_root
def test_lab_status_lists_labs_left_behind():
    emulated_cluster.STATE_DIRECTORY.mkdir(parents=True, exist_ok=True)
    files.write(Shape((Host(),)), emulated_cluster.STATE_DIRECTORY / f"{NAME}.json")
    result = CliRunner().invoke(app, ["lab", "status"])
    assert result.exit_code == 0 and f'lab "{NAME}": left behind' in result.output


@needs_root
def test_an_unknown_command_is_reported():
    with Lab(Shape((Host(),)), NAME) as lab:
        output = OutputLines()
        result = lab.run(["no-such-command"], output)
        assert result.rank == 0 and result.status and "no-such-command" in output[0][1]


@needs_root
def test_a_lab_that_fails_to_start_is_removed(monkeypatch):
    def fail(*_):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(network, "_attach_rank", fail)
    with pytest.raises(RuntimeError):
        Lab(Shape((Host(), Host())), NAME).start()
    assert NAME not in emulated_cluster.list_labs()


def test_ranks_get_the_core_with_the_least_load():
    shape = Shape((Host(ranks=2, cpu=0.66), Host(cpu=0.3), Host(cpu=0.3)))
    assert launch.assign_cores(shape, [4, 7]) == [4, 7, 4, 7]
    assert launch.assign_cores(Shape((Host(cpu=0.9), Host(ranks=3, cpu=0.3))), [0, 1]) == [0, 1, 1, 1]


def test_quotas_above_a_core_are_refused():
    launch.check_quotas(Shape((Host(ranks=2, cpu=0.5), Host(cpu=0.5), Host(cpu=0.5))), [0, 1])
    launch.check_quotas(Shape((Host(cpu=0.6), Host(cpu=0.6), Host(), Host(cpu=1.5))), [0, 1])
    with pytest.raises(UserError, match=r"ranks 0, 2 sum to 1\.2 of core 4.*at most 0\.5"):
        launch.check_quotas(Shape((Host(cpu=0.6),) * 3), [4, 7])
    with pytest.raises(UserError, match=r"ranks 0, 1, 2 sum to 1\.02 of core 0.*at most 0\.33"):
        launch.check_quotas(Shape((Host(ranks=3, cpu=0.34),)), [0])


@needs_root
def test_ranks_with_a_quota_are_pinned_to_a_core_and_links_drop_nothing():
    output = OutputLines()
    script = "grep Cpus_allowed_list /proc/self/status; cat /proc/sys/net/ipv4/tcp_congestion_control; "
    with Lab(Shape((Host(ranks=2, uplink="200mbit", cpu=0.4),) * 2), NAME) as lab:
        assert lab.run(["sh", "-c", f'{script} echo "$SHARDWRIGHT_LAB $SHARDWRIGHT_LAB_CPU"'], output).rank is None
        assert lab.run([sys.executable, "-c", SEND, "4", network.rank_address(0)]).rank is None
        links = subprocess.run(
            ["tc", "-n", network.namespace(NAME, "net"), "-s", "-j", "qdisc", "show"], capture_output=True, check=True
        )
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(4):
        lines = [line for source, line in output if source == rank]
        assert lines == [f"Cpus_allowed_list:\t{cores[rank % len(cores)]}", "reno", f"{NAME} 0.4"]
    limited = [link for link in json.loads(links.stdout) if link["kind"] == "tbf"]
    assert len(limited) == 4 and sum(link["bytes"] for link in limited) > 8e6
    assert sum(link["drops"] for link in limited) == 0


def leftovers(name: str) -> list[str]:
    """Namespaces, groups, files and processes of a lab."""
    names = [*network.list_namespaces(name), *(str(path) for path in network.NETNS_DIRECTORY.glob(f"*{name}*"))]
    names += [lab for lab in cpu_quota.labs_with_groups() if lab == name]
    names += [str(path) for path in emulated_cluster.STATE_DIRECTORY.glob(f"{name}*")]
    return names + [str(path) for path in processes(name)]


def processes(name: str) -> list[Path]:
    paths = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            paths += [entry.parent] if f"LAB_TEST={name}".encode() in entry.read_bytes().split(b"\0") else []
    return paths


def sleepers(name: str) -> list[Path]:
    """Processes of a lab with `sleep` in their command line; any may end while this looks."""
    paths = []
    for path in processes(name):
        with suppress(OSError):
            paths += [path] if b"sleep" in (path / "cmdline").read_bytes() else []
    return paths


def kill_lab_run(folder: Path, name: str, seconds: float | None) -> None:
    """SIGKILL `lab run` after `seconds`, or, with None, once the ranks run."""
    files.write(Shape((Host(ranks=2, uplink="1gbit", cpu=0.5),) * 2), folder / "shape.toml")
    arguments = ["-m", "shardwright.cli", "lab", "run", "--name", name, "--shape", str(folder / "shape.toml"), "--"]
    caller = subprocess.Popen(
        [sys.executable, *arguments, "sh", "-c", "sleep 100 & sleep 100"],
        env=os.environ | {"LAB_TEST": name},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if seconds is None:
        while len(sleepers(name)) < 8:
            assert caller.poll() is None
            time.sleep(0.05)
        assert len(leftovers(name)) > 8
    else:
        time.sleep(seconds)
    caller.send_signal(signal.SIGKILL)
    caller.wait()


@needs_root
@pytest.mark.fault
@pytest.mark.parametrize("seconds", [0.6, None, *[pytest.param(0.2 * i, marks=pytest.mark.slow) for i in range(10)]])
def test_labs_of_a_killed_caller_are_removed_by_name(tmp_path, seconds):
    kill_lab_run(tmp_path, NAME, seconds)
    if seconds is None:
        assert leftovers(NAME)
    result = CliRunner().invoke(
        app, ["lab", "down", "--name", NAME] if NAME in emulated_cluster.list_labs() else ["lab", "status"]
    )
    assert result.exit_code == 0, result.output
    assert leftovers(NAME) == []


@needs_root
@pytest.mark.slow
def test_ten_labs_in_a_row_leave_nothing():
    for _ in range(10):
        with Lab(Shape((Host(ranks=2, uplink="1gbit", cpu=0.5, front="1gbit"),) * 2), NAME) as lab:
            assert lab.run(["true"], OutputLines()).rank is None
        assert leftovers(NAME) == []


@needs_root
def test_lab_commands(tmp_path):
    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["lab", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    assert "2 hosts, 4 ranks" in run("up", "--hosts", "2", "--ranks", "2", "--uplink", "1gbit", "--name", NAME)
    assert f'lab "{NAME}": 2 hosts, 4 ranks' in run("status")
    with pytest.raises(UserError, match="is up already"):
        CliRunner().invoke(app, ["lab", "up", "--name", NAME], catch_exceptions=False)
    result = subprocess.run(
        [sys.executable, "-m", "shardwright.cli", "lab", "run", "--name", NAME, "--", "sh", "-c", "exit $RANK"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 1 <= result.returncode <= 3 and "all ranks were ended" in result.stderr
    run("down", "--name", NAME)
    with pytest.raises(UserError, match=f'no lab "{NAME}" is up'):
        CliRunner().invoke(app, ["lab", "down", "--name", NAME], catch_exceptions=False)
