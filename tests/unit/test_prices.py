"""Prices of collectives and kernels: formulas compared with cases worked by hand, and corrections by measurements."""

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
# Two hosts of two ranks: 100 MB/s inside, and an uplink of 10 MB/s that both ranks of a host share.
PAIRS = Cluster(
    1,
    "pairs",
    "preset",
    DEVICE,
    (Level("local", 2, 1e-4, 100e6), Level("host", 2, 1e-3, 10e6, group_bytes_per_second=10e6)),
)
FLAT = replace(PAIRS, levels=(Level("net", 4, 1e-3, 10e6),))


def make_collective(op: str, levels: tuple[str, ...], nums: tuple[int, ...], *samples: tuple[int, float]) -> Collective:
    samples_ = tuple(Sample((size,), (seconds,)) for size, seconds in samples)
    return Collective(
        op=op, levels=levels, nums=nums, latency_seconds=0.0, bytes_per_second=1.0, error=0.0, samples=samples_
    )


def test_ranks_of_a_group_differ_only_in_its_levels():
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
        # A ring over four: every rank sends 1.5 MB to the next, so 1.5 MB leave each host. 6 rounds, or 1.5 laps.
        ("all_reduce", ("local", "host"), 1.5 / 10 + 3.3e-3),
        # Inside a host: 1 MB to the other rank. 2 rounds.
        ("all_reduce", ("local",), 1 / 100 + 2e-4),
        # Between hosts, both local ranks at once on one uplink. 2 rounds.
        ("all_reduce", ("host",), 2 / 10 + 2e-3),
        ("all_gather", ("local", "host"), 0.75 / 10 + 1.65e-3),
        # Each rank sends a quarter to every other rank: four quarters leave a host.
        ("all_to_all", ("local", "host"), 1 / 10 + 1e-3),
        ("reduce_scatter", ("local", "host"), 1 / 10 + 1e-3),
        ("one_to_many", ("local", "host"), 0.5 / 10 + 1e-3),
        ("many_to_one", ("local", "host"), 0.5 / 10 + 1e-3),
        # Rank 0 to 1 inside the host; then 0 to 2 and 1 to 3 between hosts, 2 MB on the uplink.
        ("broadcast", ("local", "host"), 1 / 100 + 1e-4 + 2 / 10 + 1e-3),
        ("all_reduce_tree", ("local", "host"), 2 * (1 / 100 + 1e-4 + 2 / 10 + 1e-3)),
    ],
)
def test_collectives_cost_what_the_formulas_say(op, levels, seconds):
    cost = primitives.collective_cost(PAIRS, op, levels, MB)
    assert cost.seconds == pytest.approx(seconds, rel=1e-9)
    assert cost.basis == "formula"


def test_the_ring_uses_the_link_of_every_gpu_and_the_tree_is_faster_for_small_sizes():
    nic = replace(PAIRS, levels=(PAIRS.levels[0], Level("host", 2, 1e-3, 10e6)))
    levels = ("local", "host")
    assert primitives.formula_cost(nic, "all_reduce", levels, MB).seconds == pytest.approx(0.75 / 10 + 3.3e-3, rel=1e-9)
    assert primitives.formula_cost(nic, "all_reduce", ("host",), MB).seconds == pytest.approx(1 / 10 + 2e-3, rel=1e-9)
    sixteen_hosts = replace(nic, levels=(nic.levels[0], Level("host", 16, 1e-3, 10e6)))
    small_seconds = primitives.formula_cost(sixteen_hosts, "all_reduce", levels, 1000).seconds
    assert small_seconds == primitives.formula_cost(sixteen_hosts, "all_reduce_tree", levels, 1000).seconds
    ring_seconds = 2 * primitives.formula_cost(sixteen_hosts, "all_gather", levels, 1000).seconds
    assert small_seconds < ring_seconds / 2


def test_all_reduce_on_cpus_sums_inside_hosts_first():
    cpus = replace(PAIRS, device=replace(DEVICE, kind="cpu"))
    levels = ("local", "host")
    inside = 2 * (0.5 / 100 + 1e-4)  # half a vector to the other rank, and half of the sum
    assert primitives.formula_cost(cpus, "all_reduce", levels, MB).seconds == pytest.approx(
        inside + 1 / 10 + 1e-3, rel=1e-9
    )
    twelve = replace(cpus, levels=(replace(PAIRS.levels[0], num=4), replace(PAIRS.levels[1], num=3)))
    inside, across = 2 * (0.75 / 100 + 1e-4), 2 * (4 * 2 / 12 / 10 + 1e-3)  # four ranks, each a twelfth to two others
    assert primitives.formula_cost(twelve, "all_reduce", levels, MB).seconds == pytest.approx(inside + across, rel=1e-9)
    sent_RR = sum(round_.traffic_RR for round_ in rounds.collective_rounds(twelve, "all_reduce", levels, MB))
    assert roofline.bytes_by_level(twelve, sent_RR) == (("local", 1_500_000), ("host", 333_333))
    assert roofline.bytes_by_level(twelve, sent_RR, shared=True) == (("host", 1_333_333),)
    for level in levels:
        assert primitives.formula_cost(cpus, "all_reduce", (level,), MB) == primitives.formula_cost(
            PAIRS, "all_reduce", (level,), MB
        )


def test_bytes_of_a_collective_are_those_of_its_busiest_rank():
    assert primitives.collective_cost(PAIRS, "all_reduce", ("local", "host"), MB).bytes_ == 1.5 * MB
    assert primitives.collective_cost(PAIRS, "all_to_all", ("local", "host"), MB).bytes_ == 0.75 * MB
    assert primitives.collective_cost(PAIRS, "many_to_one", ("local", "host"), MB).bytes_ == 0.75 * MB


def test_bytes_follow_the_formula_even_where_the_time_is_measured():
    samples = [(1024, 1.0), (MB, 2.0)]
    measured_pairs = replace(PAIRS, collectives=(make_collective("broadcast", ("local", "host"), (2, 2), *samples),))
    for cluster_ in (PAIRS, measured_pairs):
        assert primitives.collective_cost(cluster_, "broadcast", ("local", "host"), MB).bytes_ == 2 * MB


def test_an_unknown_collective_is_refused():
    with pytest.raises(UserError, match='no collective "all_reduced"; did you mean "all_reduce"'):
        primitives.collective_cost(PAIRS, "all_reduced", ("local",), MB)


def test_uneven_traffic_takes_as_long_as_its_busiest_link():
    traffic = np.zeros((4, 4))
    traffic[0, 2], traffic[1, 2], traffic[0, 1] = 3 * MB, 1 * MB, 50 * MB
    assert primitives.slowest_link_seconds(PAIRS, traffic) == pytest.approx(
        0.5
    )  # inside: 50 MB at 100 MB/s; between hosts: 4 MB at 10 MB/s
    traffic[0, 1] = 0
    assert primitives.slowest_link_seconds(PAIRS, traffic) == pytest.approx(0.4)
    assert primitives.all_to_all_v_cost(PAIRS, ["local", "host"], traffic).seconds == pytest.approx(
        0.4 + 1e-3, rel=1e-4
    )
    duplex = replace(PAIRS, levels=(replace(PAIRS.levels[0], both_bytes_per_second=60e6), PAIRS.levels[1]))
    both_ways = np.zeros((4, 4))
    both_ways[0, 1] = both_ways[1, 0] = 3 * MB
    assert primitives.slowest_link_seconds(duplex, both_ways) == pytest.approx(6 / 60)


@given(st.lists(st.integers(0, 10**7), min_size=16, max_size=16), st.integers(0, 15), st.integers(1, 10**6))
def test_more_traffic_is_never_cheaper(values, index, extra_bytes):
    traffic = np.array(values, float).reshape(4, 4)
    increased = traffic.copy()
    increased.flat[index] += extra_bytes
    for cluster in (PAIRS, FLAT):
        assert primitives.slowest_link_seconds(cluster, increased) >= primitives.slowest_link_seconds(cluster, traffic)
        assert primitives.slowest_link_seconds(cluster, traffic.T) == pytest.approx(
            primitives.slowest_link_seconds(cluster, traffic)
        )


def test_measured_times_take_precedence_over_the_formula():
    samples = [(size, 2e-3 + size * 1e-7) for size in (1024, 65536, 1 << 20, 1 << 24)]
    cluster = replace(PAIRS, collectives=(make_collective("all_to_all", ("local", "host"), (2, 2), *samples),))
    cost = primitives.collective_cost(cluster, "all_to_all", ("host", "local"), 300_000)
    assert (cost.seconds, cost.basis) == (pytest.approx(2e-3 + 0.03), "measured")
    extrapolated = primitives.collective_cost(cluster, "all_to_all", ("local", "host"), 1 << 26)
    assert (extrapolated.seconds, extrapolated.basis) == (pytest.approx(2e-3 + (1 << 26) * 1e-7), "beyond")
    assert primitives.collective_cost(cluster, "all_to_all", ("local",), 300_000).basis == "formula"
    traffic = rounds.collective_rounds(cluster, "all_to_all", ("local", "host"), 300_000)[0].traffic_RR
    assert primitives.all_to_all_v_cost(cluster, ("local", "host"), traffic).seconds == pytest.approx(cost.seconds)


def test_measurements_of_another_number_of_ranks_are_ignored():
    cluster = replace(PAIRS, collectives=(make_collective("all_to_all", ("local",), (4,), (1024, 1.0)),))
    assert primitives.collective_cost(cluster, "all_to_all", ("local",), 1024).basis == "formula"


def test_measurements_are_scaled_to_other_levels():
    samples = [
        (size, 2 * primitives.formula_cost(FLAT, "all_reduce", ("net",), size).seconds) for size in (1024, MB, 10 * MB)
    ]
    cluster = replace(FLAT, source="measured", collectives=(make_collective("all_reduce", ("net",), (4,), *samples),))
    faster = (replace(FLAT.levels[0], num=3, bytes_per_second=40e6),)
    scaled_cluster = primitives.scale_cluster(cluster, faster)
    cost = primitives.collective_cost(scaled_cluster, "all_reduce", ("net",), MB)
    assert cost.basis == "scaled"
    assert cost.seconds == pytest.approx(
        2 * primitives.formula_cost(scaled_cluster, "all_reduce", ("net",), MB).seconds, rel=1e-6
    )
    scaled_cluster.verify()


def test_collectives_overlapped_with_computation_slow_it_down():
    def make_beside(bytes_: int, together_seconds: float) -> Beside:
        return Beside(
            op="all_to_all",
            levels=("local", "host"),
            bytes_=bytes_,
            collective_seconds=0.1,
            matmul_seconds=0.1,
            together_seconds=together_seconds,
        )

    cluster = replace(PAIRS, beside=(make_beside(10**6, 0.12), make_beside(10**4, 0.2)))
    levels = ("local", "host")
    assert primitives.compute_slowdown(cluster, "all_to_all", levels, 10**6) == pytest.approx(0.2)
    assert primitives.compute_slowdown(cluster, "all_to_all", levels, 10**5) == pytest.approx(0.6)
    assert primitives.compute_slowdown(cluster, "all_to_all", levels, 10**9) == pytest.approx(0.2)
    assert primitives.compute_slowdown(cluster, "broadcast", levels, 10**6) == 0.0
    isolated = primitives.collective_cost(cluster, "all_to_all", levels, 10**6).seconds
    assert primitives.overlapped_cost(cluster, "all_to_all", levels, 10**6, 0.01).seconds == isolated
    assert primitives.overlapped_cost(cluster, "all_to_all", levels, 10**6, 0.5).seconds == pytest.approx(
        0.5 + 0.2 * isolated
    )


@pytest.mark.parametrize(("collective", "products"), [(0.125, 0.15), (0.15, 0.125)])
def test_a_collective_and_products_that_were_timed_apart_slow_each_other_down(collective, products):
    """The speeds while both run give the ends that were measured."""
    pair = Beside(
        op="all_reduce",
        levels=("local", "host"),
        bytes_=10**6,
        collective_seconds=0.1,
        matmul_seconds=0.1,
        together_seconds=0.15,
        collective_end_seconds=collective,
        matmul_end_seconds=products,
    )
    cluster, levels = replace(PAIRS, beside=(pair,)), ("local", "host")
    rate = 1 - primitives.collective_slowdown(cluster, "all_reduce", levels, 10**6)
    lost = primitives.compute_slowdown(cluster, "all_reduce", levels, 10**6)
    both = min(collective, products)
    assert both * rate + (collective - both) == pytest.approx(0.1)
    assert both * (1 - lost * rate) + (products - both) == pytest.approx(0.1)
    assert primitives.collective_slowdown(cluster, "broadcast", levels, 10**6) == pytest.approx(1 - rate)
    assert primitives.collective_slowdown(cluster, "reduce_scatter", levels, 10**6) == 0.0


def test_the_device_prices_products_rows_and_copies():
    cost = primitives.matmul_cost(DEVICE, 10, 20, 30)
    assert cost.seconds == pytest.approx(1e-5 + 12_000e-9 + 4 * (200 + 600 + 300) * 1e-8)
    assert (cost.bytes_, cost.basis) == (4 * 1100, "formula")
    assert primitives.row_access_cost(DEVICE, "gather", 1000, 128).seconds == pytest.approx(1000 * (1e-7 + 128e-9))
    assert primitives.copy_cost(DEVICE, MB, "hbm", "dram").seconds == pytest.approx(MB / 1e8)
    with pytest.raises(UserError, match='no price of "update float32" for card; known: matmul float32'):
        primitives.row_access_cost(DEVICE, "update", 1, 4)
    assert primitives.copy_cost(DEVICE, MB, "dram", "hbm").seconds == pytest.approx(
        MB * 1e-8
    )  # the link between the tiers is the slowest part
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
def test_rows_are_read_in_whole_cache_lines(bytes_, touched):
    assert primitives.cache_line_bytes(bytes_) == touched


def test_cache_line_bytes_equal_the_average_number_of_touched_lines():
    for bytes_ in range(4, 400, 4):
        starts = range(0, bytes_ * 64, bytes_)
        lines = [(start + bytes_ - 1) // 64 - start // 64 + 1 for start in starts]
        assert primitives.cache_line_bytes(bytes_) == 64 * sum(lines) / len(lines)


def test_samples_correct_a_price_near_their_size():
    price = Price(
        op="matmul", dtype="float32", seconds_per_flop=1e-9, samples=(Sample((64, 64, 64), (2 * 2 * 64**3 * 1e-9,)),)
    )
    device = replace(DEVICE, prices=(price,))
    at_sample, beyond = primitives.matmul_cost(device, 64, 64, 64), primitives.matmul_cost(device, 2048, 2048, 2048)
    assert at_sample.seconds == pytest.approx(2**0.5 * 2 * 64**3 * 1e-9)
    assert beyond.seconds == pytest.approx(2 * 2048**3 * 1e-9, rel=1e-3)
    assert (at_sample.basis, beyond.basis) == ("measured", "beyond")


def test_a_batch_beyond_the_saturated_size_has_the_same_rate():
    """The rate measured for a narrow layer also holds for larger batches."""
    narrow = Sample((primitives.SATURATED_SIZE, 16, 16), (2 * 2 * primitives.SATURATED_SIZE * 16 * 16 * 1e-9,))
    device = replace(DEVICE, prices=(Price(op="matmul", dtype="float32", seconds_per_flop=1e-9, samples=(narrow,)),))
    at_limit, beyond = (
        primitives.matmul_cost(device, num, 16, 16).seconds
        for num in (primitives.SATURATED_SIZE, 64 * primitives.SATURATED_SIZE)
    )
    assert at_limit > 1.2 * 2 * primitives.SATURATED_SIZE * 16 * 16 * 1e-9 and beyond == pytest.approx(64 * at_limit)


def test_row_prices_are_interpolated_between_measured_widths():
    samples = (Sample((10, 64), (1e-4,)), Sample((1000, 64), (1e-3,)), Sample((1000, 128), (2e-3,)))
    price = Price(op="gather", dtype="float32", seconds_per_row=1.0, samples=samples)
    device = replace(DEVICE, prices=(price,))
    assert primitives.row_access_cost(device, "gather", 500, 64).seconds == pytest.approx(5e-4)
    wide = replace(DEVICE, prices=(replace(price, seconds_per_byte=1e-8),))
    assert primitives.row_access_cost(wide, "gather", 500, 256).seconds == pytest.approx(500 * (2e-6 + 128e-8))
    assert primitives.row_access_cost(device, "gather", 500, 96).seconds == pytest.approx(
        1e-3
    )  # a row of 96 bytes takes two lines


@given(
    st.floats(1e-6, 1e-2),
    st.floats(1e-11, 1e-7),
    st.lists(st.floats(-0.02, 0.02), min_size=6, max_size=6),
)
def test_fit_line_recovers_a_noisy_line(intercept, slope, noise):
    sizes = np.array([1e3, 3e4, 3e5, 2e6, 2e7, 6e7])
    line = linear_fit.fit_line(sizes, (intercept + slope * sizes) * (1 + np.array(noise)))
    new_sizes = np.array([1e4, 1e6, 3e7])
    np.testing.assert_allclose(line[0] + line[1] * new_sizes, intercept + slope * new_sizes, rtol=0.05)


def test_fit_line_ignores_an_outlier():
    sizes = np.array([1e3, 3e4, 3e5, 2e6, 2e7, 6e7])
    seconds = 1e-3 + 1e-9 * sizes
    seconds[2] *= 5
    intercept, slope = linear_fit.fit_line(sizes, seconds)
    assert (intercept, slope) == (pytest.approx(1e-3, rel=0.1), pytest.approx(1e-9, rel=0.1))


def test_fitted_coefficients_are_never_negative():
    sizes = np.array([1.0, 2.0, 4.0])
    intercept, slope = linear_fit.fit_line(sizes, np.array([4.0, 3.0, 2.0]))
    assert intercept > 0 and slope == 0


@pytest.mark.parametrize("name", presets.cluster_names())
def test_every_number_of_a_preset_has_a_source(name):
    cluster = presets.load_cluster(name)
    assert (cluster.name, cluster.source) == (name, "measured" if name == "two-cores" else "preset")
    text = (presets.FOLDER / f"{name}.toml").read_text()
    assert "Sources: " in text if cluster.source == "preset" else "Measured " in text
    for level in text.split("[[levels]]")[1:] if cluster.source == "preset" else ():
        for line in level.splitlines():
            assert "#" in line or "per_second" not in line and "seconds" not in line, f"{line} has no source"


def test_presets_have_the_numbers_of_the_papers():
    zionex, het_b = presets.load_cluster("zionex-128-a100"), presets.load_cluster("het-b")
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
    assert het_b.levels[0].bytes_per_second == 10 * presets.load_cluster("het-a").levels[0].bytes_per_second
    with pytest.raises(UserError, match='no cluster "zionex"; did you mean|no cluster "zionex"; allowed'):
        presets.load_cluster("zionex")


@pytest.mark.parametrize(
    "name, peak, memory, link, card",
    [
        ("a100", 312e12, 2.039e12, 600e9, 25e9),
        ("a800", 312e12, 2.039e12, 400e9, 25e9),
        ("h100", 989e12, 3.35e12, 900e9, 50e9),
        ("h200", 989e12, 4.8e12, 900e9, 50e9),
        ("b200", 2250e12, 8e12, 1800e9, 50e9),
    ],
)
def test_presets_of_data_sheets_reach_the_fitted_shares(name, peak, memory, link, card):
    cluster, fitted = presets.load_cluster(name), presets.load_cluster("h800-256")
    device, own = cluster.device, {}
    assert device.peak_flops_per_second == peak and device.tiers[0].read_bytes_per_second == memory
    assert 2 * cluster.levels[0].bytes_per_second == link
    assert cluster.levels[1].bytes_per_second / card == pytest.approx(fitted.levels[1].bytes_per_second / 12.5e9, 1e-3)
    for op in ("matmul", "attention"):
        for machine in (device, fitted.device):
            price = primitives.find_price(machine, op, "bfloat16")
            own[machine.name, op] = price.seconds_per_flop * machine.peak_flops_per_second
        assert own[device.name, op] == pytest.approx(own[fitted.device.name, op], rel=1e-3)


def test_the_bound_of_a_step_is_its_slowest_resource():
    load = roofline.ResourceUsage(flops=10**9, memory_bytes=10**8, link_bytes=(("host", 10**7),), host_copy_bytes=10**6)
    bound = roofline.step_bound(PAIRS, load)
    assert dict(bound.seconds_by_resource) == pytest.approx(
        {"memory": 0.1, "products": 1.0, "link host": 1.0, "host copy": 0.01}
    )
    assert bound.overlapped_seconds == pytest.approx(1.0)
    assert bound.bottleneck == "products"
    with pytest.raises(UserError, match='no level "rack"'):
        roofline.step_bound(PAIRS, roofline.ResourceUsage(link_bytes=(("rack", 1),)))


def test_the_bound_of_a_shared_link_sums_its_ranks():
    trevor = presets.load_cluster("trevor")
    inner, host = trevor.levels
    traffic_RR = np.ones((trevor.num_ranks, trevor.num_ranks))
    (_, inner_bytes), (name, host_bytes) = roofline.bytes_by_level(trevor, traffic_RR)
    assert (inner_bytes, name, host_bytes) == (inner.num - 1, host.name, inner.num * (host.num - 1))
    assert roofline.bytes_by_level(trevor, traffic_RR, shared=True) == ((host.name, inner.num * host_bytes),)
    load = roofline.ResourceUsage(shared_link_bytes=((host.name, 10**9),))
    assert host.group_bytes_per_second is not None
    shared_seconds = roofline.step_bound(trevor, load).seconds_by_resource[-1]
    assert shared_seconds == (f"link {host.name}, shared", pytest.approx(1e9 / host.group_bytes_per_second))


def test_the_ddl_roofline_bounds_throughput():
    assert roofline.ideal_throughput(10.0, 0.5) == 5.0 and roofline.ideal_throughput(10.0, 2.0) == 10.0
    assert roofline.semi_ideal_throughput(10.0, 1.0) == 5.0
    for ratio in (0.01, 0.5, 1.0, 3.0, 100.0):
        assert (
            roofline.semi_ideal_throughput(10.0, ratio)
            <= roofline.ideal_throughput(10.0, ratio)
            <= 2 * roofline.semi_ideal_throughput(10.0, ratio)
        )
