"""The planner's constants for models of layers, fitted to published configurations, and each predicted from the others.

    python -m benchmarks.layer_calibration [--write NAME]

Computed, nothing is run: steps of Kuaishou's best configurations (benchmarks/published_layers.py, 21 on 32 to 256
H800) are predicted with the preset h800-256. The constants are fitted by least squares of the relative errors; memory
comes from formulas without any. A JSON line per configuration: the published and the predicted step in seconds, the
error, the error if this configuration is left out of the fit (`left_out_error_percent`), parts of the step. A last line
has the constants, the mean and the 90th percentile of both errors, and of those that are counted: without
configurations that alone have their model, degrees and recomputation.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks import results_file
from benchmarks.published_layers import PEAK_FLOPS, PUBLISHED, Published
from shardwright.planner.layers.layer_time import DTYPE, LayerTimer, Overheads
from shardwright.planner.layers.step_time import StepSeconds, step_seconds
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster, Price

ITERATIONS = 4
STEP = 0.02  # of the logarithm of a constant, for derivatives
PRIOR = 0.01  # weight of a constant's distance from where the fit starts, as a logarithm
MEMORY_RATE = 3.35e12  # bytes/s, NVIDIA's data sheet
NETWORK_RATE = 12.5e9


@dataclass(frozen=True, slots=True)
class Constants:
    """Shares of the peak that products, attention and network reach; share of tensor parallel collectives that is not
    hidden; milliseconds of a chunk's forward and backward besides its layers."""

    products: float = 0.6
    attention: float = 0.28
    network: float = 0.8
    exposed: float = 0.26
    chunk_ms: float = 0.9

    def cluster(self) -> Cluster:
        cluster = presets.load_cluster("h800-256")
        prices = (
            Price(
                op="matmul",
                dtype=DTYPE,
                seconds_per_flop=1 / (self.products * PEAK_FLOPS),
                seconds_per_byte=1 / (0.85 * MEMORY_RATE),
            ),
            Price(op="attention", dtype=DTYPE, seconds_per_flop=1 / (self.attention * PEAK_FLOPS)),
        )
        copies = tuple(price for price in cluster.device.prices if price.op in ("host_to_device", "device_to_host"))
        inner, outer = cluster.levels
        levels = inner, replace(outer, bytes_per_second=self.network * NETWORK_RATE)
        return replace(cluster, device=replace(cluster.device, prices=prices + copies), levels=levels)


def predict(row: Published, constants: Constants) -> StepSeconds:
    timer = LayerTimer(
        row.transformer,
        row.batch,
        row.degrees,
        constants.cluster(),
        Overheads(constants.exposed, 1e-3 * constants.chunk_ms),
    )
    return step_seconds(timer)


def errors(rows: Sequence[Published], constants: Constants) -> np.ndarray:
    return np.array([predict(row, constants).total / row.seconds - 1 for row in rows])


def fit(rows: Sequence[Published], start: Constants, iterations: int = ITERATIONS) -> Constants:
    """Gauss-Newton steps over the logarithms of the constants."""
    names, first = list(asdict(start)), np.log(list(asdict(start).values()))
    logs = first.copy()

    def at(values: np.ndarray) -> Constants:
        return Constants(**dict(zip(names, np.exp(values).tolist(), strict=True)))

    for _ in range(iterations):
        now = errors(rows, at(logs))
        slopes = np.stack([(errors(rows, at(logs + STEP * unit)) - now) / STEP for unit in np.eye(len(names))], 1)
        system = np.concatenate([slopes, PRIOR * np.eye(len(names))])
        step = np.linalg.lstsq(system, np.concatenate([-now, PRIOR * (first - logs)]), rcond=None)[0]
        logs = logs + np.clip(step, -0.5, 0.5)
    return at(logs)


def result_lines(rows: Sequence[Published]) -> Iterator[dict[str, Any]]:
    constants = fit(rows, Constants())
    groups = Counter(map(_group, rows))
    fitted, left_out = errors(rows, constants), list[float]()
    for number, row in enumerate(rows):
        others = [*rows[:number], *rows[number + 1 :]]
        left_out.append(float(errors([row], fit(others, constants, 2))[0]))
        step = predict(row, constants)
        line = {"benchmark": "layer_calibration", "model": row.model, "ranks": row.ranks, "published_s": row.seconds}
        line |= {"predicted_s": step.total, "error_percent": 100 * float(fitted[number])}
        line |= {"left_out_error_percent": 100 * left_out[-1], "alone": groups[_group(row)] == 1}
        line |= {"bubble_percent": 100 * step.bubble, "gradients_s": step.gradients}
        print(f"{number + 1} of {len(rows)}", file=sys.stderr)
        yield {key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()}
    counted = np.array([groups[_group(row)] > 1 for row in rows])
    last = {"benchmark": "layer_calibration", "constants": {k: round(v, 4) for k, v in asdict(constants).items()}}
    for name, values in (("error", fitted), ("left_out_error", np.array(left_out))):
        sizes = 100 * np.abs(values)
        last |= {f"mean_{name}_percent": round(float(sizes.mean()), 2)}
        last |= {f"p90_{name}_percent": round(float(np.quantile(sizes, 0.9)), 2)}
        last |= {f"counted_mean_{name}_percent": round(float(sizes[counted].mean()), 2)}
        last |= {f"counted_p90_{name}_percent": round(float(np.quantile(sizes[counted], 0.9)), 2)}
    yield last


def _group(row: Published) -> tuple[Any, ...]:
    return row.model, row.length, row.tensor, row.context, row.recompute


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args(arguments)
    lines: list[dict[str, Any]] = []
    for line in result_lines(PUBLISHED[5:8] if args.smoke else PUBLISHED):
        lines.append(line)
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "layer_calibration", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
