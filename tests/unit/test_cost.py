"""Formulas by hand-worked cases, and what measurements add to them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.planner.price import primitives, roofline, rounds
from shardwright.spec import linear_fit, presets
from shardwright.spec.cluster import Beside, Cluster, Collective, Device, Level, Price, Sample, Tier

MB = 1_000_000
DEVICE = Device(
    "card",
    "cuda",
    (Tier("hbm", 10**9, 1e9, 5e8), Tier("dram", 10**10, 2e8, 1e8)),
    (
        Price(op="matmul", dtype="float32", call_seconds=1e-5, seconds_per_flop=1e-9, seconds_per_byte=1e-8),
        Price(op="gather", dtype="float32", seconds_per_row=1e-7, seconds_per_byte=1e-9),
        Price(op="codec", dtype="fp16", call_seconds=1e-6, seconds_per_byte=1e-9),
        Price(op="host_to_device", seconds_per_byte=1e-8),
    ),
)
# Two hosts of two: 100 MB/s inside, and an uplink of 10 MB/s that both share.
PAIRS = Cluster(
    1,
    "pairs",
    "preset",
    DEVICE,
    (Level("local", 2, 1e-4, 100e6), Level("host", 2, 1e-3, 10e6, group_bytes_per_second=10e6)),
)
FLAT = replace(PAIRS, levels=(Level("net", 4, 1e-3, 10e6),))


def collective(op: str, levels: tuple[str, ...], nums: tuple[int, ...], *samples: tuple[int, float]) -> Collective:
    found = tuple(Sample((size,), (seconds,)) for size, seconds in samples)
    return Collective(
        op=op, levels=levels, nums=nums, latency_seconds=0.0, bytes_per_second=1.0, error=0.0, samples=found
    )


def test_groups_differ_along_their_levels_only():
    assert rounds.rank_groups(PAIRS, ["local"]).tolist() == [[0, 1], [2, 3]]
    assert rounds.rank_groups(PAIRS, ["host"]).tolist() == [[0, 2], [1, 3]]
    assert rounds.rank_groups(PAIRS, ["local", "host"]).tolist() == [[0, 1, 2, 3]]
    three = replace(PAIRS, levels=(Level("a", 2, 0, 1), Level("b", 3, 0, 1), Level("c", 2, 0, 1)))
    assert rounds.rank_groups(three, ["a", "c"]).tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    with pytest.raises(UserError, match='no level "rack"; pairs has local, host'):
        rounds.rank_groups(PAIRS, ["rack"])


@pytest.mark.parametrize(
    ("op", "levels", "seconds"),
    [
        # A ring over four: every rank sends 1.5 MB to the next; of each host 1.5 MB cross. One and a half laps.
        ("all_reduce", ("local", "host"), 1.5 / 10 + 3.3e-3),
        # Inside a host: 1 MB to the other. 2 rounds.
        ("all_reduce", ("local",), 1 / 100 + 2e-4),
        # Between hosts, both local ranks at once on one uplink. 2 rounds.
        ("all_reduce", ("host",), 2 / 10 + 2e-3),
        ("all_gather", ("local", "host"), 0.75 / 10 + 1.65e-3),
        # Each rank sends a quarter to each other: four quarters leave a host.
        ("all_to_all", ("local", "host"), 1 / 10 + 1e-3),
        ("reduce_scatter", ("local", "host"), 1 / 10 + 1e-3),
        ("one_to_many", ("local", "host"), 0.5 / 10 + 1e-3),
        ("many_to_one", ("local", "host"), 0.5 / 10 + 1e-3),
        # 0 to 1 inside; then 0 to 2 and 1 to 3 across, 2 MB on the uplink.
        ("broadcast", ("local", "host"), 1 / 100 + 1e-4 + 2 / 10 + 1e-3),
        ("all_reduce_tree", ("local", "host"), 2 * (1 / 100 + 1e-4 + 2 / 10 + 1e-3)),
    ],
)
def test_formulas(op, levels, seconds):
    found = primitives.collective_cost(PAIRS, op, levels, MB)
    assert found.seconds == pytest.approx(seconds, rel=1e-9)
    assert found.basis == "formula"


def test_gpus_leave_their_host_by_every_card():
    own = replace(PAIRS, levels=(PAIRS.levels[0], Level("host", 2, 1e-3, 10e6)))
    levels = ("local", "host")
    assert primitives.formula_cost(own, "all_reduce", levels, MB).seconds == pytest.approx(0.75 / 10 + 3.3e-3, rel=1e-9)
    assert primitives.formula_cost(own, "all_reduce", ("host",), MB).seconds == pytest.approx(1 / 10 + 2e-3, rel=1e-9)
    many = replace(own, levels=(own.levels[0], Level("host", 16, 1e-3, 10e6)))
    small = primitives.formula_cost(many, "all_reduce", levels, 1000).seconds
    assert small == primitives.formula_cost(many, "all_reduce_tree", levels, 1000).seconds
    ring = 2 * primitives.formula_cost(many, "all_gather", levels, 1000).seconds
    assert small < ring / 2


def test_on_cpus_the_ranks_of_a_host_sum_first():
    two = replace(PAIRS, device=replace(DEVICE, kind="cpu"))
    levels = ("local", "host")
    inside = 2 * (0.5 / 100 + 1e-4)  # half a vector to the other rank, and half of the sum
    assert primitives.formula_cost(two, "all_reduce", levels, MB).seconds == pytest.approx(
        inside + 1 / 10 + 1e-3, rel=1e-9
    )
    three = replace(two, levels=(replace(PAIRS.levels[0], num=4), replace(PAIRS.levels[1], num=3)))
    inside, across = 2 * (0.75 / 100 + 1e-4), 2 * (4 * 2 / 12 / 10 + 1e-3)  # four ranks, each a twelfth to two others
    assert primitives.formula_cost(three, "all_reduce", levels, MB).seconds == pytest.approx(inside + across, rel=1e-9)
    sent_RR = sum(one.traffic_RR for one in rounds.collective_rounds(three, "all_reduce", levels, MB))
    assert roofline.bytes_by_level(three, sent_RR) == (("local", 1_500_000), ("host", 333_333))
    assert roofline.bytes_by_level(three, sent_RR, shared=True) == (("host", 1_333_333),)
    for alone in levels:
        assert primitives.formula_cost(two, "all_reduce", (alone,), MB) == primitives.formula_cost(
            PAIRS, "all_reduce", (alone,), MB
        )


def test_bytes_are_those_of_the_busiest_rank():
    assert primitives.collective_cost(PAIRS, "all_reduce", ("local", "host"), MB).bytes_ == 1.5 * MB
    assert primitives.collective_cost(PAIRS, "all_to_all", ("local", "host"), MB).bytes_ == 0.75 * MB
    assert primitives.collective_cost(PAIRS, "many_to_one", ("local", "host"), MB).bytes_ == 0.75 * MB


def test_bytes_rest_on_the_formula_however_the_time_was_found():
    samples = [(1024, 1.0), (MB, 2.0)]
    cluster = replace(PAIRS, collectives=(collective("broadcast", ("local", "host"), (2, 2), *samples),))
    for found in (PAIRS, cluster):
        assert primitives.collective_cost(found, "broadcast", ("local", "host"), MB).bytes_ == 2 * MB


def test_an_unknown_collective():
    with pytest.raises(UserError, match='no collective "all_reduced"; did you mean "all_reduce"'):
        primitives.collective_cost(PAIRS, "all_reduced", ("local",), MB)


def test_uneven_traffic_takes_as_long_as_its_busiest_link():
    traffic = np.zeros((4, 4))
    traffic[0, 2], traffic[1, 2], traffic[0, 1] = 3 * MB, 1 * MB, 50 * MB
    assert primitives.slowest_link_seconds(PAIRS, traffic) == pytest.approx(
        0.5
    )  # inside: 50 MB at 100; across: 4 at 10
    traffic[0, 1] = 0
    assert primitives.slowest_link_seconds(PAIRS, traffic) == pytest.approx(0.4)
    assert primitives.all_to_all_v_cost(PAIRS, ["local", "host"], traffic).seconds == pytest.approx(
        0.4 + 1e-3, rel=1e-4
    )
    both = replace(PAIRS, levels=(replace(PAIRS.levels[0], both_bytes_per_second=60e6), PAIRS.levels[1]))
    back = np.zeros((4, 4))
    back[0, 1] = back[1, 0] = 3 * MB
    assert primitives.slowest_link_seconds(both, back) == pytest.approx(6 / 60)


@given(st.lists(st.integers(0, 10**7), min_size=16, max_size=16), st.integers(0, 15), st.integers(1, 10**6))
def test_more_traffic_is_never_cheaper(numbers, place, more):
    traffic = np.array(numbers, float).reshape(4, 4)
    greater = traffic.copy()
    greater.flat[place] += more
    for cluster in (PAIRS, FLAT):
        assert primitives.slowest_link_seconds(cluster, greater) >= primitives.slowest_link_seconds(cluster, traffic)
        assert primitives.slowest_link_seconds(cluster, traffic.T) == pytest.approx(
            primitives.slowest_link_seconds(cluster, traffic)
        )


def test_what_was_measured_counts():
    line = [(size, 2e-3 + size * 1e-7) for size in (1024, 65536, 1 << 20, 1 << 24)]
    cluster = replace(PAIRS, collectives=(collective("all_to_all", ("local", "host"), (2, 2), *line),))
    found = primitives.collective_cost(cluster, "all_to_all", ("host", "local"), 300_000)
    assert (found.seconds, found.basis) == (pytest.approx(2e-3 + 0.03), "measured")
    beyond = primitives.collective_cost(cluster, "all_to_all", ("local", "host"), 1 << 26)
    assert (beyond.seconds, beyond.basis) == (pytest.approx(2e-3 + (1 << 26) * 1e-7), "beyond")
    assert primitives.collective_cost(cluster, "all_to_all", ("local",), 300_000).basis == "formula"
    traffic = rounds.collective_rounds(cluster, "all_to_all", ("local", "host"), 300_000)[0].traffic_RR
    assert primitives.all_to_all_v_cost(cluster, ("local", "host"), traffic).seconds == pytest.approx(found.seconds)


def test_of_other_numbers_of_ranks_nothing_was_measured():
    cluster = replace(PAIRS, collectives=(collective("all_to_all", ("local",), (4,), (1024, 1.0)),))
    assert primitives.collective_cost(cluster, "all_to_all", ("local",), 1024).basis == "formula"


def test_scaled_to_other_levels():
    times = [
        (size, 2 * primitives.formula_cost(FLAT, "all_reduce", ("net",), size).seconds) for size in (1024, MB, 10 * MB)
    ]
    cluster = replace(FLAT, source="measured", collectives=(collective("all_reduce", ("net",), (4,), *times),))
    faster = (replace(FLAT.levels[0], num=3, bytes_per_second=40e6),)
    other = primitives.scale_cluster(cluster, faster)
    found = primitives.collective_cost(other, "all_reduce", ("net",), MB)
    assert found.basis == "scaled"
    assert found.seconds == pytest.approx(
        2 * primitives.formula_cost(other, "all_reduce", ("net",), MB).seconds, rel=1e-6
    )
    other.verify()


def test_beside_computation():
    def pair(bytes_: int, together: float) -> Beside:
        return Beside(
            op="all_to_all",
            levels=("local", "host"),
            bytes_=bytes_,
            collective_seconds=0.1,
            matmul_seconds=0.1,
            together_seconds=together,
        )

    cluster = replace(PAIRS, beside=(pair(10**6, 0.12), pair(10**4, 0.2)))
    levels = ("local", "host")
    assert primitives.compute_slowdown(cluster, "all_to_all", levels, 10**6) == pytest.approx(0.2)
    assert primitives.compute_slowdown(cluster, "all_to_all", levels, 10**5) == pytest.approx(0.6)
    assert primitives.compute_slowdown(cluster, "all_to_all", levels, 10**9) == pytest.approx(0.2)
    assert primitives.compute_slowdown(cluster, "broadcast", levels, 10**6) == 0.0
    alone = primitives.collective_cost(cluster, "all_to_all", levels, 10**6).seconds
    assert primitives.overlapped_cost(cluster, "all_to_all", levels, 10**6, 0.01).seconds == alone
    assert primitives.overlapped_cost(cluster, "all_to_all", levels, 10**6, 0.5).seconds == pytest.approx(
        0.5 + 0.2 * alone
    )


def test_the_device():
    found = primitives.matmul_cost(DEVICE, 10, 20, 30)
    assert found.seconds == pytest.approx(1e-5 + 12_000e-9 + 4 * (200 + 600 + 300) * 1e-8)
    assert (found.bytes_, found.basis) == (4 * 1100, "formula")
    assert primitives.row_access_cost(DEVICE, "gather", 1000, 128).seconds == pytest.approx(1000 * (1e-7 + 128e-9))
    assert primitives.copy_cost(DEVICE, MB, "hbm", "dram").seconds == pytest.approx(MB / 1e8)
    with pytest.raises(UserError, match='no price of "update float32" for card; known: matmul float32'):
        primitives.row_access_cost(DEVICE, "update", 1, 4)
    assert primitives.copy_cost(DEVICE, MB, "dram", "hbm").seconds == pytest.approx(
        MB * 1e-8
    )  # the way between is the slower
    with pytest.raises(UserError, match='no dtype "float31"; did you mean "float32"'):
        primitives.matmul_cost(
            replace(DEVICE, prices=(replace(DEVICE.prices[0], dtype="float31"),)), 1, 1, 1, "float31"
        )
    with pytest.raises(UserError, match=r"traffic of shape \(2, 2\) among 4 ranks"):
        primitives.all_to_all_v_cost(PAIRS, ["local"], np.zeros((2, 2)))
    with pytest.raises(UserError, match='no memory tier "ssd"; card has hbm, dram'):
        primitives.copy_cost(DEVICE, 1, "hbm", "ssd")


@pytest.mark.parametrize(
    ("bytes_", "touched"), [(64, 64), (128, 128), (32, 64), (16, 64), (4, 64), (96, 128), (100, 160)]
)
def test_rows_lie_in_whole_lines(bytes_, touched):
    assert primitives.cache_line_bytes(bytes_) == touched


def test_touched_lines_by_counting():
    for bytes_ in range(4, 400, 4):
        starts = range(0, bytes_ * 64, bytes_)
        lines = [(start + bytes_ - 1) // 64 - start // 64 + 1 for start in starts]
        assert primitives.cache_line_bytes(bytes_) == 64 * sum(lines) / len(lines)


def test_samples_bend_a_price():
    price = Price(
        op="matmul", dtype="float32", seconds_per_flop=1e-9, samples=(Sample((64, 64, 64), (2 * 2 * 64**3 * 1e-9,)),)
    )
    device = replace(DEVICE, prices=(price,))
    near, far = primitives.matmul_cost(device, 64, 64, 64), primitives.matmul_cost(device, 2048, 2048, 2048)
    assert near.seconds == pytest.approx(2**0.5 * 2 * 64**3 * 1e-9)
    assert far.seconds == pytest.approx(2 * 2048**3 * 1e-9, rel=1e-3)
    assert (near.basis, far.basis) == ("measured", "beyond")


def test_a_batch_past_the_longest_size_is_as_fast_as_that():
    """Narrow layers run at a rate of their own, however many samples there are."""
    narrow = Sample((primitives.SATURATED_SIZE, 16, 16), (2 * 2 * primitives.SATURATED_SIZE * 16 * 16 * 1e-9,))
    device = replace(DEVICE, prices=(Price(op="matmul", dtype="float32", seconds_per_flop=1e-9, samples=(narrow,)),))
    here, beyond = (
        primitives.matmul_cost(device, num, 16, 16).seconds
        for num in (primitives.SATURATED_SIZE, 64 * primitives.SATURATED_SIZE)
    )
    assert here > 1.2 * 2 * primitives.SATURATED_SIZE * 16 * 16 * 1e-9 and beyond == pytest.approx(64 * here)


def test_rows_between_widths_that_were_measured():
    samples = (Sample((10, 64), (1e-4,)), Sample((1000, 64), (1e-3,)), Sample((1000, 128), (2e-3,)))
    price = Price(op="gather", dtype="float32", seconds_per_row=1.0, samples=samples)
    device = replace(DEVICE, prices=(price,))
    assert primitives.row_access_cost(device, "gather", 500, 64).seconds == pytest.approx(5e-4)
    steep = replace(DEVICE, prices=(replace(price, seconds_per_byte=1e-8),))
    assert primitives.row_access_cost(steep, "gather", 500, 256).seconds == pytest.approx(500 * (2e-6 + 128e-8))
    assert primitives.row_access_cost(device, "gather", 500, 96).seconds == pytest.approx(
        1e-3
    )  # 96 bytes lie in two lines


@given(
    st.floats(1e-6, 1e-2),
    st.floats(1e-11, 1e-7),
    st.lists(st.floats(-0.02, 0.02), min_size=6, max_size=6),
)
def test_a_line_is_found_again(fixed, each, noise):
    sizes = np.array([1e3, 3e4, 3e5, 2e6, 2e7, 6e7])
    found = linear_fit.fit_line(sizes, (fixed + each * sizes) * (1 + np.array(noise)))
    at = np.array([1e4, 1e6, 3e7])
    np.testing.assert_allclose(found[0] + found[1] * at, fixed + each * at, rtol=0.05)


def test_a_disturbed_sample_bends_nothing():
    sizes = np.array([1e3, 3e4, 3e5, 2e6, 2e7, 6e7])
    seconds = 1e-3 + 1e-9 * sizes
    seconds[2] *= 5
    fixed, each = linear_fit.fit_line(sizes, seconds)
    assert (fixed, each) == (pytest.approx(1e-3, rel=0.1), pytest.approx(1e-9, rel=0.1))


def test_coefficients_are_never_negative():
    sizes = np.array([1.0, 2.0, 4.0])
    fixed, each = linear_fit.fit_line(sizes, np.array([4.0, 3.0, 2.0]))
    assert fixed > 0 and each == 0


@pytest.mark.parametrize("name", presets.cluster_names())
def test_presets(name):
    cluster = presets.load_cluster(name)
    assert (cluster.name, cluster.source) == (name, "measured" if name == "two-cores" else "preset")
    text = (presets.FOLDER / f"{name}.toml").read_text()
    assert "Sources: " in text if cluster.source == "preset" else "Measured " in text
    for level in text.split("[[levels]]")[1:] if cluster.source == "preset" else ():
        for line in level.splitlines():
            assert "#" in line or "per_second" not in line and "seconds" not in line, f"{line} has no source"


def test_presets_are_the_papers():
    zionex, het = presets.load_cluster("zionex-128-a100"), presets.load_cluster("het-b")
    assert (
        zionex.num_ranks,
        presets.load_cluster("h800-256").num_ranks,
        presets.load_cluster("h200-64").num_ranks,
    ) == (
        128,
        256,
        64,
    )
    assert zionex.levels[0].bytes_per_second / zionex.levels[1].bytes_per_second == 12  # 600 over 25 GB/s in DHEN is 24
    assert het.levels[0].bytes_per_second == 10 * presets.load_cluster("het-a").levels[0].bytes_per_second
    with pytest.raises(UserError, match='no cluster "zionex"; did you mean|no cluster "zionex"; allowed'):
        presets.load_cluster("zionex")


def test_bound_of_a_step():
    load = roofline.ResourceUsage(flops=10**9, memory_bytes=10**8, link_bytes=(("host", 10**7),), host_copy_bytes=10**6)
    found = roofline.step_bound(PAIRS, load)
    assert dict(found.seconds_by_resource) == pytest.approx(
        {"memory": 0.1, "products": 1.0, "link host": 1.0, "host copy": 0.01}
    )
    assert found.serial_seconds == pytest.approx(2.11)
    assert found.overlapped_seconds == pytest.approx(1.0)
    assert found.bottleneck == "products"
    with pytest.raises(UserError, match='no level "rack"'):
        roofline.step_bound(PAIRS, roofline.ResourceUsage(link_bytes=(("rack", 1),)))


def test_ranks_that_share_a_link_share_its_bound():
    trevor = presets.load_cluster("trevor")
    inner, host = trevor.levels
    traffic_RR = np.ones((trevor.num_ranks, trevor.num_ranks))
    (_, own), (name, across) = roofline.bytes_by_level(trevor, traffic_RR)
    assert (own, name, across) == (inner.num - 1, host.name, inner.num * (host.num - 1))
    assert roofline.bytes_by_level(trevor, traffic_RR, shared=True) == ((host.name, inner.num * across),)
    load = roofline.ResourceUsage(shared_link_bytes=((host.name, 10**9),))
    assert host.group_bytes_per_second is not None
    shared = roofline.step_bound(trevor, load).seconds_by_resource[-1]
    assert shared == (f"link {host.name}, shared", pytest.approx(1e9 / host.group_bytes_per_second))


def test_ddl_roofline():
    assert roofline.ideal_throughput(10.0, 0.5) == 5.0 and roofline.ideal_throughput(10.0, 2.0) == 10.0
    assert roofline.semi_ideal_throughput(10.0, 1.0) == 5.0
    for ratio in (0.01, 0.5, 1.0, 3.0, 100.0):
        assert (
            roofline.semi_ideal_throughput(10.0, ratio)
            <= roofline.ideal_throughput(10.0, ratio)
            <= 2 * roofline.semi_ideal_throughput(10.0, ratio)
        )
    # Even load, nothing overlapped: what is measured lies on the lower line.
    compute, wait = 2.0, 1.0
    flops = [10.0 * compute] * 4
    assert roofline.average_flops_per_second(flops, compute + wait) == pytest.approx(
        roofline.semi_ideal_throughput(10.0, compute / wait)
    )
    assert roofline.average_flops_per_second([40.0, 0, 0, 0], 4.0 + wait) < roofline.semi_ideal_throughput(
        10.0, 4.0 / wait
    )
