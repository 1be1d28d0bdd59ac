"""Roofline of a layer: its products by shape and the attention kernel, below what the device can reach.

Arithmetic intensity is FLOPs over bytes through device memory; of a product, of its three matrices once.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shardwright.planner.layers.activations import VALUE_BYTES
from shardwright.planner.layers.layer_names import degrees_name
from shardwright.planner.layers.layer_search import LayerSplit, Training
from shardwright.planner.layers.layer_time import DTYPE, LayerProduct, LayerTimer, layer_products
from shardwright.planner.price import primitives
from shardwright.report import plots
from shardwright.report.expert_roofline import MARKERS
from shardwright.report.layer_figures import LEGEND_BELOW, log_axis
from shardwright.report.plots import Figure
from shardwright.report.units import time_text
from shardwright.spec.transformer import Transformer

NUM_LINE_POINTS = 80
TERA = 1e12
MIN_SIZE, SIZE_RANGE = 7, 14  # pixels of a marker; its area grows with its time


class LayerWork(NamedTuple):
    """Work of a layer's forward for a micro-batch, or of the head's; `shape`: of a product."""

    name: str
    shape: str
    flops: float
    bytes_: float
    seconds: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes_

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds


def roofline_figure(training: Training, split: LayerSplit) -> Figure:
    """Predicted FLOP/s over arithmetic intensity, with the roofs of the device."""
    works = sorted(layer_works(training, split), key=lambda work: -work.seconds)  # small markers above large ones
    total = sum(work.seconds for work in works)
    intensities = [work.intensity for work in works]
    peak, bytes_per_second = device_roofs(training)
    ridge = peak / bytes_per_second
    x = np.geomspace(min(*intensities, ridge) / 3, max(*intensities, ridge) * 2, NUM_LINE_POINTS)
    x = np.sort(np.append(x, ridge))
    price = primitives.find_price(training.cluster.device, "matmul", DTYPE)
    lines = (
        ("roofs of the device", np.minimum(peak, x * bytes_per_second), "solid"),
        ("products, by the plan's prices", 1 / (price.seconds_per_flop + price.seconds_per_byte / x), "dash"),
    )
    traces = [
        plots.trace(name, x.tolist(), (rates / TERA).tolist(), color="var(--muted)", dash=dash) | {"hoverinfo": "skip"}
        for name, rates, dash in lines
    ]
    traces += [_mark(number, work, work.seconds / total) for number, work in enumerate(works)]
    layout = plots.figure_layout(
        xaxis=log_axis("FLOPs per byte", [x[0], x[-1]]),
        yaxis=log_axis("TFLOP/s of a rank", [x[0] * bytes_per_second, peak]),
        **LEGEND_BELOW,
    )
    caption = (
        f"Forward of a layer and of the head, for a micro-batch of {degrees_name(split.degrees)}; larger markers take "
        "longer. A product's backward has the same intensity. Norms and activation functions are bound by memory, at "
        f"{1 / price.seconds_per_byte / TERA:.3g} TB/s."
    )
    return Figure(
        "layer_roofline", "Roofline of a layer, split 1", caption, 340 + 10 * len(traces), tuple(traces), layout
    )


def device_roofs(training: Training) -> tuple[float, float]:
    """FLOP/s of products, and bytes per second of the device's memory."""
    return training.flops.peak_flops_per_second, training.cluster.device.tiers[0].read_bytes_per_second


def layer_works(training: Training, split: LayerSplit) -> Iterator[LayerWork]:
    """Of each kind of layer, without repetitions, and of the head."""
    timer = training.timer(split.degrees, split.batch)
    model = training.model
    works: dict[tuple[str, str], LayerWork] = {}
    for layer, _ in model.layer_kinds(range(model.layers)):
        for work in _works_of_layer(timer, layer):
            works.setdefault((work.name, work.shape), work)
    yield from works.values()
    yield _product_work(
        timer, "head", LayerProduct(timer.tokens, model.hidden, model.vocabulary / split.degrees.tensor)
    )


def _works_of_layer(timer: LayerTimer, layer: int) -> Iterator[LayerWork]:
    model, degrees = timer.model, timer.degrees
    products = layer_products(model, layer, timer.tokens, degrees, timer.batch.imbalance)
    for name, product in zip(product_names(model, layer), products, strict=True):
        yield _product_work(timer, name, product)
    seconds = timer.layer(layer)["attention"].forward
    attention = primitives.find_price(timer.cluster.device, "attention", DTYPE)
    channels, keys = 2 * model.query_width, 2 * model.key_value_width
    if model.latent:  # each head has keys and values of its own
        channels, keys = model.query_width + model.heads * model.latent.value_channels, channels
    yield LayerWork(
        "attention kernel",
        "",
        seconds / attention.seconds_per_flop,
        VALUE_BYTES * timer.tokens * (channels + keys) / degrees.tensor,
        seconds,
    )


def _product_work(timer: LayerTimer, name: str, product: LayerProduct) -> LayerWork:
    m, k, n = round(product.m), round(product.k), round(product.n)
    cost = primitives.matmul_cost(timer.cluster.device, m, k, n, DTYPE)
    shape = f"{m:,} x {k:,} x {n:,}" + (f", {product.times:.0f} times" if product.times > 1 else "")
    return LayerWork(
        name, shape, 2 * m * k * n * product.times, cost.bytes_ * product.times, cost.seconds * product.times
    )


def product_names(model: Transformer, layer: int) -> list[str]:
    """Names of `layer_products`, in its order."""
    names = ["queries, keys, values", "attention output"]
    if model.latent is not None:
        names = ["queries", "low-rank keys and values", "keys and values", "attention output"]
        if model.latent.query_rank:
            names.insert(0, "low-rank queries")
    if model.experts is None or not model.has_experts(layer):
        return [*names, "MLP, first", "MLP, second"]
    names += ["router", "experts, first", "experts, second"]
    if model.experts.shared:
        names += ["shared experts, first", "shared experts, second"]
    return names


def _mark(number: int, work: LayerWork, share: float) -> dict[str, Any]:
    shape = f", {work.shape}" if work.shape else ""
    text = (
        f"{work.name}{shape}<br>{work.intensity:,.3g} FLOPs per byte, {work.rate / TERA:,.3g} TFLOP/s<br>"
        f"{time_text(work.seconds)} forward"
    )
    return {
        "type": "scatter",
        "name": work.name,
        "mode": "markers",
        "x": [work.intensity],
        "y": [work.rate / TERA],
        "hovertemplate": f"{text}<extra></extra>",
        "marker": {
            "color": f"var(--hue{number % plots.NUM_HUES})",
            "symbol": MARKERS[number % len(MARKERS)],
            "size": MIN_SIZE + SIZE_RANGE * share**0.5,
            "line": {"color": "var(--page)", "width": 1},
        },
    }
