"""A cluster as a page and as tables: measurements, fitted lines, and the errors of the fits."""

from collections.abc import Iterator, Sequence
from math import log10
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardwright.planner.price import primitives, roofline
from shardwright.report import html_template, plots
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure
from shardwright.report.run_page import ABSENT, bytes_text
from shardwright.report.units import time_text
from shardwright.spec import files
from shardwright.spec.cluster import Cluster, Collective, Level, Price

MIN_REPORTED_STOLEN_SHARE = 0.03  # share of the time from which a note says so
BAD_FIT = 0.25  # mean deviation from which a note says so
SOURCE_DESCRIPTIONS = MappingProxyType(
    {
        "measured": "measured on these machines",
        "emulated": "measured on an emulated cluster (shardwright lab)",
        "preset": "published rates, which real machines do not reach; nothing here was measured",
        "scaled": "scaled by formulas from measurements of other levels",
    }
)


def render(cluster: Cluster, target: Path) -> Path:
    figures = tuple(cluster_figures(cluster))
    text = html_template.render_template(
        "cluster.html.j2",
        brand="Shardwright cluster",
        curves_title="Measured points and fitted lines",
        title=cluster.name,
        notes=(f"{SOURCE_DESCRIPTIONS[cluster.source].capitalize()}.", *notes(cluster)),
        grids=grids(cluster),
        curves=figures,
        figures=figures,
    )
    files.write_text(text, target)
    return target


def grids(cluster: Cluster) -> tuple[tuple[str, Grid], ...]:
    found = (
        ("Memory", tier_grid(cluster)),
        ("Operations of one rank", price_grid(cluster)),
        ("Links", link_grid(cluster)),
        ("Collectives", collective_grid(cluster)),
        ("Collectives overlapped with matrix products", overlap_grid(cluster)),
    )
    return tuple((title, grid) for title, grid in found if grid.rows)


def notes(cluster: Cluster) -> Iterator[str]:
    bad = [f"{one.op} {one.dtype}".strip() for one in cluster.device.prices if one.error > BAD_FIT]
    bad += [f"{one.op} over {' and '.join(one.levels)}" for one in cluster.collectives if one.error > BAD_FIT]
    if bad:
        yield f"A straight line fits {', '.join(bad)} poorly: predictions there interpolate between measured samples."
    if cluster.stolen_share > MIN_REPORTED_STOLEN_SHARE:
        share = f"{100 * cluster.stolen_share:.0f} %"
        yield f"Other virtual machines took {share} of the processor time: measure again when it is quieter."


def tier_grid(cluster: Cluster) -> Grid:
    rows = [
        (
            tier.name,
            bytes_text(tier.bytes_),
            rate_text(tier.read_bytes_per_second),
            rate_text(tier.write_bytes_per_second),
        )
        for tier in cluster.device.tiers
    ]
    return Grid(("tier", "per rank", "read", "write"), tuple(rows))


def price_grid(cluster: Cluster) -> Grid:
    columns = ("operation", "call", "FLOPs", "row", "bytes", "fit error")
    rows = []
    for one in cluster.device.prices:
        flops = f"{1e-9 / one.seconds_per_flop:,.0f} GFLOP/s" if one.seconds_per_flop else ""
        call, each = one.call_seconds, one.seconds_per_byte
        if one.op == "calls":  # whose sizes are numbers of them
            call, each = each, 0.0
        bytes_ = rate_text(1 / each) if each else ""
        cells = (time_cell(call), flops, time_cell(one.seconds_per_row), bytes_, fit_error_text(one.error, one.samples))
        rows.append((f"{one.op} {one.dtype}".strip(), *cells))
    return Grid(columns, tuple(rows))


def link_grid(cluster: Cluster) -> Grid:
    def told(level: Level) -> tuple[str, ...]:
        both, group = level.both_bytes_per_second, level.group_bytes_per_second
        one_way = (str(level.num), time_cell(level.latency_seconds), rate_text(level.bytes_per_second))
        return level.name, *one_way, rate_text(both) if both else ABSENT, rate_text(group) if group else "not shared"

    columns = ("level", "size", "latency", "one way", "both ways", "shared by a group")
    return Grid(columns, tuple(told(level) for level in cluster.levels))


def collective_grid(cluster: Cluster) -> Grid:
    def told(one: Collective) -> tuple[str, ...]:
        largest = one.samples[-1].sizes[0]
        fitted = (
            time_cell(one.latency_seconds),
            rate_text(one.bytes_per_second),
            fit_error_text(one.error, one.samples),
        )
        return one.op, " + ".join(one.levels), *fitted, bytes_text(largest)

    columns = ("operation", "levels", "latency", "rate", "fit error", "measured up to")
    return Grid(columns, tuple(told(one) for one in cluster.collectives), num_text_columns=2)


def overlap_grid(cluster: Cluster) -> Grid:
    rows = []
    for one in cluster.beside:
        serial, longest = one.collective_seconds + one.matmul_seconds, max(one.collective_seconds, one.matmul_seconds)
        hidden = (serial - one.together_seconds) / (serial - longest)
        told = (time_cell(one.collective_seconds), time_cell(one.matmul_seconds), time_cell(one.together_seconds))
        rows.append((one.op, " + ".join(one.levels), bytes_text(one.bytes_), *told, f"{100 * hidden:.0f} %"))
    columns = ("operation", "levels", "size", "collective alone", "products alone", "together", "overlapped")
    return Grid(columns, tuple(rows), num_text_columns=2)


def cluster_figures(cluster: Cluster) -> Iterator[Figure]:
    by_levels: dict[tuple[str, ...], list[Collective]] = {}
    for one in cluster.collectives:
        by_levels.setdefault(one.levels, []).append(one)
    for levels, found in by_levels.items():
        yield collective_figure(cluster, levels, found)
    for one in cluster.device.prices:
        if one.op == "matmul" and one.samples:
            yield matmul_figure(cluster, one)
    yield from row_rate_figures(cluster)
    if any(one.op == "matmul" and one.seconds_per_flop for one in cluster.device.prices):
        yield ddl_roofline_figure(cluster)


def collective_figure(cluster: Cluster, levels: tuple[str, ...], collectives: Sequence[Collective]) -> Figure:
    """Samples as points, and what is predicted from them as a line."""
    data = []
    for number, one in enumerate(collectives):
        color = f"var(--hue{number % plots.NUM_HUES})"
        sizes = [sample.sizes[0] for sample in one.samples]
        ends = log10(sizes[0]), log10(sizes[-1])
        along = [10 ** (ends[0] + (ends[1] - ends[0]) * at / 60) for at in range(61)]
        predicted = [primitives.collective_cost(cluster, one.op, levels, round(bytes_)).seconds for bytes_ in along]
        data.append(line_trace(one.op, along, predicted, color))
        data.append(marker_trace(one.op, sizes, [sample.seconds for sample in one.samples], color))
    return log_log_figure(
        f"over-{'-'.join(levels)}",
        f"Over {' and '.join(levels)}",
        "Time of one call by message size. Points are measurements, lines are predictions.",
        data,
        ("message size", "time"),
        ("B", "s"),
    )


def matmul_figure(cluster: Cluster, price: Price) -> Figure:
    """Predicted against measured rate, a point for each size."""
    measured, predicted, texts = [], [], []
    for sample in price.samples:
        m, k, n = sample.sizes
        flops = 2e-9 * m * k * n
        measured.append(flops / sample.seconds)
        predicted.append(flops / primitives.matmul_cost(cluster.device, m, k, n, price.dtype).seconds)
        texts.append(f"{m} x {k} x {n}")
    points = marker_trace("products", measured, predicted, "var(--hue0)") | {
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
    }
    ends = [min(measured + predicted), max(measured + predicted)]
    return log_log_figure(
        f"products-{price.dtype}",
        f"Matrix products in {price.dtype}",
        "Predicted against measured GFLOP/s, a point for each size. On the line, both agree.",
        [line_trace("equal", ends, ends, "var(--muted)"), points],
        ("measured GFLOP/s", "predicted GFLOP/s"),
    )


def row_rate_figures(cluster: Cluster) -> Iterator[Figure]:
    found = [one for one in cluster.device.prices if one.samples and len(one.samples[0].sizes) == 2]
    data = []
    for number, one in enumerate(found):
        most = max(sample.sizes[0] for sample in one.samples)
        at = sorted((sample for sample in one.samples if sample.sizes[0] == most), key=lambda sample: sample.sizes[1])
        rates = [sample.sizes[0] * sample.sizes[1] / sample.seconds for sample in at]
        color = f"var(--hue{number % plots.NUM_HUES})"
        data.append(plots.trace(one.op, [sample.sizes[1] for sample in at], rates, color=color, markers=True))
    if data:
        caption = (
            "Bytes a second of one rank by row size: gather, rewrite, this engine's lookup and update, both on rows in "
            "cache (near), and columns copied into place."
        )
        yield log_log_figure("rows", "Random rows", caption, data, ("row", "rate"), ("B", "B/s"))


def ddl_roofline_figure(cluster: Cluster) -> Figure:
    """What a step can reach, by how much it computes for each second it communicates."""
    peak = roofline.peak_flops_per_second(cluster, _first_dtype(cluster))
    ratios = [10 ** (-2 + 4 * at / 80) for at in range(81)]
    full = [1e-9 * roofline.ideal_throughput(peak, ratio) for ratio in ratios]
    half = [1e-9 * roofline.semi_ideal_throughput(peak, ratio) for ratio in ratios]
    data = [
        line_trace("all overlapped", ratios, full, "var(--hue0)"),
        line_trace("nothing overlapped", ratios, half, "var(--hue1)"),
    ]
    return log_log_figure(
        "ddl-roofline",
        "DDL-Roofline",
        "GFLOP/s of one rank by seconds of computation per second of communication. Below the lower line: imbalance.",
        data,
        ("computation / communication", "GFLOP/s"),
    )


def scatter(name: str, title: str, lines: Sequence[dict[str, Any]]) -> Figure:
    """Predicted against measured seconds of workloads, each with its kind and a text."""
    everything = [one[side] for one in lines for side in ("predicted", "measured")]
    ends = [min(everything), max(everything)]
    data = [line_trace("equal", ends, ends, "var(--muted)")]
    for number, kind in enumerate(sorted({one["kind"] for one in lines})):
        found = [one for one in lines if one["kind"] == kind]
        measured, predicted = ([one[side] for one in found] for side in ("measured", "predicted"))
        points = marker_trace(kind, measured, predicted, f"var(--hue{number % plots.NUM_HUES})") | {"showlegend": True}
        hover = "%{text}<br>%{x:.3s}s, predicted %{y:.3s}s<extra></extra>"
        data.append(points | {"text": [one["text"] for one in found], "hovertemplate": hover})
    caption = "Workloads that were predicted before they ran. On the line, both agree."
    return log_log_figure(name, title, caption, data, ("measured", "predicted"), ("s", "s"))


def log_log_figure(
    name: str,
    title: str,
    caption: str,
    data: Sequence[dict[str, Any]],
    axes: tuple[str, str],
    units: tuple[str, str] = ("", ""),
) -> Figure:
    """`units` follow the ticks' prefixes (600µs): values are in units without one. Without a unit, ticks are plain."""
    x, y = (
        plots.axis(
            type="log",
            title={"text": text},
            tickformat="~s" if unit else ",~r",
            ticksuffix=unit,
            dtick=log_dtick([v for one in data for v in one[side]]),
        )
        for text, side, unit in zip(axes, "xy", units, strict=True)
    )
    return Figure(name, title, caption, 380, tuple(data), plots.figure_layout(xaxis=x, yaxis=y, showlegend=True))


def log_dtick(values: Sequence[float]) -> int | str:
    """Every power of ten, or 2 and 5 between them, or all digits: as many as there is room for."""
    decades = log10(max(values) / min(values))
    return 1 if decades > 3 else "D2" if decades > 1 else "D1"


def line_trace(name: str, x: Sequence[float], y: Sequence[float], color: str) -> dict[str, Any]:
    return plots.trace(name, list(x), list(y), color=color) | {"hoverinfo": "skip", "legendgroup": name}


def marker_trace(name: str, x: Sequence[float], y: Sequence[float], color: str) -> dict[str, Any]:
    marker = {"color": color, "size": 7}
    return {"type": "scatter", "mode": "markers", "name": name, "x": list(x), "y": list(y), "marker": marker} | {
        "showlegend": False,
        "legendgroup": name,
    }


def time_cell(seconds: float) -> str:
    return time_text(seconds) if seconds else ""


def rate_text(bytes_per_second: float) -> str:
    for unit, length in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_second >= length:
            return f"{bytes_per_second / length:.3g} {unit}"
    return f"{bytes_per_second / 1e3:.3g} kB/s"


def fit_error_text(error: float, samples: Sequence[object]) -> str:
    return f"{100 * error:.0f} %" if samples else ABSENT


def _first_dtype(cluster: Cluster) -> str:
    return next(one.dtype for one in cluster.device.prices if one.op == "matmul" and one.seconds_per_flop)
