"""Report of a cluster, as a page and as text tables: measurements, fitted lines and their errors."""

from collections.abc import Iterator, Sequence
from math import log10
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardwright.planner.price import primitives, roofline
from shardwright.report import html_template, plots
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure
from shardwright.report.units import bytes_text, time_text
from shardwright.report.workload_grids import ABSENT
from shardwright.spec import files
from shardwright.spec.cluster import Cluster, Collective, Level, Price

MIN_REPORTED_STOLEN_SHARE = 0.03  # a note reports a larger share of stolen processor time
BAD_FIT = 0.25  # a note reports a larger mean relative error of a fit
SOURCE_DESCRIPTIONS = MappingProxyType(
    {
        "measured": "measured on the cluster's machines",
        "emulated": "measured on an emulated cluster (shardwright lab)",
        "preset": "published rates, which real machines do not reach; nothing here was measured",
        "scaled": "scaled by formulas from measurements of other levels",
    }
)


def render(cluster: Cluster, target: Path) -> Path:
    """Write the page of a cluster."""
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
    all_grids = (
        ("Memory", tier_grid(cluster)),
        ("Operations of one rank", price_grid(cluster)),
        ("Links", link_grid(cluster)),
        ("Collectives", collective_grid(cluster)),
        ("Collectives overlapped with matrix products", overlap_grid(cluster)),
    )
    return tuple((title, grid) for title, grid in all_grids if grid.rows)


def notes(cluster: Cluster) -> Iterator[str]:
    poor = [f"{price.op} {price.dtype}".strip() for price in cluster.device.prices if price.error > BAD_FIT]
    poor += [f"{line.op} over {' and '.join(line.levels)}" for line in cluster.collectives if line.error > BAD_FIT]
    if poor:
        yield f"A straight line fits {', '.join(poor)} poorly: predictions there interpolate between measured samples."
    if cluster.stolen_share > MIN_REPORTED_STOLEN_SHARE:
        share = f"{100 * cluster.stolen_share:.0f} %"
        yield f"Other virtual machines took {share} of the processor time: measure again when they take less."


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
    for price in cluster.device.prices:
        flops = f"{1e-9 / price.seconds_per_flop:,.0f} GFLOP/s" if price.seconds_per_flop else ""
        call, per_byte = price.call_seconds, price.seconds_per_byte
        if price.op == "calls":  # the sizes of its samples are numbers of calls
            call, per_byte = per_byte, 0.0
        bytes_ = rate_text(1 / per_byte) if per_byte else ""
        cells = (
            time_cell(call),
            flops,
            time_cell(price.seconds_per_row),
            bytes_,
            fit_error_text(price.error, price.samples),
        )
        rows.append((f"{price.op} {price.dtype}".strip(), *cells))
    return Grid(columns, tuple(rows))


def link_grid(cluster: Cluster) -> Grid:
    def link_cells(level: Level) -> tuple[str, ...]:
        both, group = level.both_bytes_per_second, level.group_bytes_per_second
        cells = (str(level.num), time_cell(level.latency_seconds), rate_text(level.bytes_per_second))
        return (level.name, *cells, rate_text(both) if both else ABSENT, rate_text(group) if group else "not shared")

    columns = ("level", "size", "latency", "one way", "both ways", "shared by a group")
    return Grid(columns, tuple(link_cells(level) for level in cluster.levels))


def collective_grid(cluster: Cluster) -> Grid:
    def collective_cells(collective: Collective) -> tuple[str, ...]:
        largest = collective.samples[-1].sizes[0]
        fit_cells = (
            time_cell(collective.latency_seconds),
            rate_text(collective.bytes_per_second),
            fit_error_text(collective.error, collective.samples),
        )
        return collective.op, " + ".join(collective.levels), *fit_cells, bytes_text(largest)

    columns = ("operation", "levels", "latency", "rate", "fit error", "measured up to")
    return Grid(columns, tuple(collective_cells(collective) for collective in cluster.collectives), num_text_columns=2)


def overlap_grid(cluster: Cluster) -> Grid:
    rows = []
    for pair in cluster.beside:
        serial, longer = (
            pair.collective_seconds + pair.matmul_seconds,
            max(pair.collective_seconds, pair.matmul_seconds),
        )
        hidden = (serial - pair.together_seconds) / (serial - longer)
        time_cells = (
            time_cell(pair.collective_seconds),
            time_cell(pair.matmul_seconds),
            time_cell(pair.together_seconds),
            time_cell(pair.collective_end_seconds) if pair.collective_end_seconds else "",
            time_cell(pair.matmul_end_seconds) if pair.matmul_end_seconds else "",
        )
        rows.append((pair.op, " + ".join(pair.levels), bytes_text(pair.bytes_), *time_cells, f"{100 * hidden:.0f} %"))
    alone, together = ("collective only", "products only"), ("together", "collective ends", "products end")
    columns = ("operation", "levels", "size", *alone, *together, "overlapped")
    return Grid(columns, tuple(rows), num_text_columns=2)


def cluster_figures(cluster: Cluster) -> Iterator[Figure]:
    by_levels: dict[tuple[str, ...], list[Collective]] = {}
    for collective in cluster.collectives:
        by_levels.setdefault(collective.levels, []).append(collective)
    for levels, collectives in by_levels.items():
        yield collective_figure(cluster, levels, collectives)
    for price in cluster.device.prices:
        if price.op == "matmul" and price.samples:
            yield matmul_figure(cluster, price)
    yield from row_rate_figures(cluster)
    if any(price.op == "matmul" and price.seconds_per_flop for price in cluster.device.prices):
        yield ddl_roofline_figure(cluster)


def collective_figure(cluster: Cluster, levels: tuple[str, ...], collectives: Sequence[Collective]) -> Figure:
    """Measured times as points, predicted times as lines."""
    data = []
    for index, collective in enumerate(collectives):
        color = f"var(--hue{index % plots.NUM_HUES})"
        sizes = [sample.sizes[0] for sample in collective.samples]
        exponents = log10(sizes[0]), log10(sizes[-1])
        x = [10 ** (exponents[0] + (exponents[1] - exponents[0]) * i / 60) for i in range(61)]
        predicted = [primitives.collective_cost(cluster, collective.op, levels, round(bytes_)).seconds for bytes_ in x]
        data.append(line_trace(collective.op, x, predicted, color))
        data.append(marker_trace(collective.op, sizes, [sample.seconds for sample in collective.samples], color))
    return log_log_figure(
        f"over-{'-'.join(levels)}",
        f"Over {' and '.join(levels)}",
        "Time of one call by message size. Points are measurements, lines are predictions.",
        data,
        ("message size", "time"),
        ("B", "s"),
    )


def matmul_figure(cluster: Cluster, price: Price) -> Figure:
    """Predicted against measured rate, with a point per size."""
    actual, predicted, texts = [], [], []
    for sample in price.samples:
        m, k, n = sample.sizes
        flops = 2e-9 * m * k * n
        actual.append(flops / sample.seconds)
        predicted.append(flops / primitives.matmul_cost(cluster.device, m, k, n, price.dtype).seconds)
        texts.append(f"{m} x {k} x {n}")
    points = marker_trace("products", actual, predicted, "var(--hue0)") | {
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
    }
    ends = [min(actual + predicted), max(actual + predicted)]
    return log_log_figure(
        f"products-{price.dtype}",
        f"Matrix products in {price.dtype}",
        "Predicted against measured GFLOP/s, one point per size. They agree on the line.",
        [line_trace("equal", ends, ends, "var(--muted)"), points],
        ("measured GFLOP/s", "predicted GFLOP/s"),
    )


def row_rate_figures(cluster: Cluster) -> Iterator[Figure]:
    row_prices = [price for price in cluster.device.prices if price.samples and len(price.samples[0].sizes) == 2]
    data = []
    for index, price in enumerate(row_prices):
        rows = max(sample.sizes[0] for sample in price.samples)
        widest = sorted(
            (sample for sample in price.samples if sample.sizes[0] == rows), key=lambda sample: sample.sizes[1]
        )
        rates = [sample.sizes[0] * sample.sizes[1] / sample.seconds for sample in widest]
        color = f"var(--hue{index % plots.NUM_HUES})"
        data.append(plots.trace(price.op, [sample.sizes[1] for sample in widest], rates, color=color, markers=True))
    if data:
        caption = (
            "Bytes per second of one rank by row size: gather, rewrite, Shardwright's lookup and update (near: of "
            "rows in cache), and column copies."
        )
        yield log_log_figure("rows", "Random rows", caption, data, ("row", "rate"), ("B", "B/s"))


def ddl_roofline_figure(cluster: Cluster) -> Figure:
    """Reachable rate of a step by its ratio of computation to communication."""
    peak = roofline.peak_flops_per_second(cluster, _first_matmul_dtype(cluster))
    ratios = [10 ** (-2 + 4 * i / 80) for i in range(81)]
    ideal = [1e-9 * roofline.ideal_throughput(peak, ratio) for ratio in ratios]
    semi_ideal = [1e-9 * roofline.semi_ideal_throughput(peak, ratio) for ratio in ratios]
    data = [
        line_trace("all overlapped", ratios, ideal, "var(--hue0)"),
        line_trace("nothing overlapped", ratios, semi_ideal, "var(--hue1)"),
    ]
    return log_log_figure(
        "ddl-roofline",
        "DDL-Roofline",
        "GFLOP/s of one rank by seconds of computation per second of communication. Below the lower line: imbalance.",
        data,
        ("computation / communication", "GFLOP/s"),
    )


def scatter(name: str, title: str, lines: Sequence[dict[str, Any]]) -> Figure:
    """Predicted against measured seconds of workloads; each of `lines` has a kind and a text."""
    all_seconds = [line[side] for line in lines for side in ("predicted", "measured")]
    ends = [min(all_seconds), max(all_seconds)]
    data = [line_trace("equal", ends, ends, "var(--muted)")]
    for index, kind in enumerate(sorted({line["kind"] for line in lines})):
        lines_of_kind = [line for line in lines if line["kind"] == kind]
        actual, predicted = ([line[side] for line in lines_of_kind] for side in ("measured", "predicted"))
        points = marker_trace(kind, actual, predicted, f"var(--hue{index % plots.NUM_HUES})") | {"showlegend": True}
        hover = "%{text}<br>%{x:.3s}s, predicted %{y:.3s}s<extra></extra>"
        data.append(points | {"text": [line["text"] for line in lines_of_kind], "hovertemplate": hover})
    caption = "Workloads that were predicted before they ran. Prediction and measurement agree on the line."
    return log_log_figure(name, title, caption, data, ("measured", "predicted"), ("s", "s"))


def log_log_figure(
    name: str,
    title: str,
    caption: str,
    data: Sequence[dict[str, Any]],
    axes: tuple[str, str],
    units: tuple[str, str] = ("", ""),
) -> Figure:
    """A figure with logarithmic axes; `units` follow a tick's SI prefix (600µs); "" for plain numbers."""
    x, y = (
        plots.axis(
            type="log",
            title={"text": text},
            tickformat="~s" if unit else ",~r",
            ticksuffix=unit,
            dtick=log_dtick([value for trace in data for value in trace[side]]),
        )
        for text, side, unit in zip(axes, "xy", units, strict=True)
    )
    return Figure(name, title, caption, 380, tuple(data), plots.figure_layout(xaxis=x, yaxis=y, showlegend=True))


def log_dtick(values: Sequence[float]) -> int | str:
    """Plotly's dtick by the range of values: ticks at powers of ten, also at 2 and 5, or at all digits."""
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


def _first_matmul_dtype(cluster: Cluster) -> str:
    return next(price.dtype for price in cluster.device.prices if price.op == "matmul" and price.seconds_per_flop)
