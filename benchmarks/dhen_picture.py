"""Picture of samples/s and memory of DHEN by depth: measured in the lab, or simulated in the published setting.

    python -m benchmarks.dhen_picture RESULTS PICTURE

RESULTS is a results file of benchmarks.hsdp, whose first setting is drawn, or of benchmarks.dhen_published.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.sharding_picture import EMPTY, INK, PALE, svg_polyline, svg_text

COLORS = {"DDP": "#8250df", "HSDP": "#0969da", "FSDP": "#bc4c00", "fully_shard 2-D": "#57606a"}
WIDTH, HEIGHT, TOP, BOTTOM = 860, 420, 72, 52
PANELS = ((76, 430), (500, 850))  # left and right edges
BEST = "best"
Values = Mapping[str, Any]  # of a strategy at a depth: plotted values and predictions by key, and whether it "fits"


@dataclass(frozen=True, slots=True)
class Axis:
    """A vertical axis: the key of its values, and the distance of grid lines."""

    key: str
    title: str
    every: float
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    note: str
    axes: tuple[Axis, Axis]
    depths: Mapping[int, Mapping[str, Values]]  # by depth and strategy; BEST: the planner's choice
    every_depth: int

    @property
    def strategies(self) -> list[str]:
        return [name for name in COLORS if any(name in values for values in self.depths.values())]


def simulated_picture(lines: Sequence[Mapping[str, Any]]) -> Picture:
    return Picture(
        "DHEN on 256 A100s by depth, simulated",
        "filled: fits next to 8 GB of tables; hollow: does not; ring: the planner's choice",
        (
            Axis("samples_per_second", "million samples/s", 0.5, 1e-6),
            Axis("gigabytes", "GB of a rank, dense model", 10.0),
        ),
        {
            line["layers"]: {name: line[name] for name in (*COLORS, BEST) if name in line}
            for line in lines
            if "layers" in line
        },
        8,
    )


def measured_picture(lines: Sequence[Mapping[str, Any]]) -> Picture:
    setting, depths = lines[0]["setting"], dict[int, dict[str, Values]]()
    for line in (line for line in lines if line["setting"] == setting and "depth" in line):
        by_strategy = depths.setdefault(line["depth"], {})
        if "side" in line:
            values = {"rate": line["samples_s"], "bytes": line["most_mb"], "fits": line["fits"]}
            if "predicted_ms" in line:
                values["predicted rate"] = line["samples_s"] * line["ms"][0] / line["predicted_ms"]
                values["predicted bytes"] = line["predicted_mb"]
            by_strategy[line["side"]] = values
        elif line["chosen"] in by_strategy:
            by_strategy[BEST] = by_strategy[line["chosen"]]
    return Picture(
        f"DHEN by depth, lab {setting}, hosts and links emulated",
        "filled: within the budget; hollow: not; dashes: predicted; ring: the planner's choice",
        (Axis("rate", "thousand samples/s", 1.0, 1e-3), Axis("bytes", "peak MB of a rank", 50.0)),
        depths,
        4,
    )


def draw(picture: Picture) -> Iterator[str]:
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{EMPTY}"/>'
    yield svg_text(PANELS[0][0], 24, picture.title, size=15)
    yield svg_text(PANELS[0][0], 42, picture.note, PALE)
    for number, strategy in enumerate(picture.strategies):
        x = PANELS[1][0] + 40 + 72 * number
        yield f'<circle cx="{x}" cy="20" r="5" fill="{COLORS[strategy]}"/>'
        yield svg_text(x + 10, 24, strategy)
    for sides, axis in zip(PANELS, picture.axes, strict=True):
        yield from panel(picture, sides, axis)
    yield "</svg>"


def panel(picture: Picture, sides: tuple[int, int], axis: Axis) -> Iterator[str]:
    left, right = sides
    depths = sorted(picture.depths)
    values = {
        (strategy, depth, name): axis.scale * by_strategy[strategy][name]
        for depth, by_strategy in picture.depths.items()
        for strategy in (*picture.strategies, BEST)
        for name in (axis.key, f"predicted {axis.key}")
        if strategy in by_strategy and name in by_strategy[strategy]
    }
    max_value = 1.08 * max(values.values())

    def to_xy(depth: float, value: float) -> tuple[float, float]:
        x = left + (right - left) * (depth - depths[0] + 2) / (depths[-1] - depths[0] + 4)
        return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / max_value, 1)

    yield svg_text(left, TOP - 8, axis.title, PALE)
    for step in range(int(max_value / axis.every) + 1):
        x, y = left, to_xy(0, step * axis.every)[1]
        yield f'<line x1="{x}" y1="{y}" x2="{right}" y2="{y}" stroke="{PALE}" stroke-opacity="0.25"/>'
        yield svg_text(x - 6, y + 4, f"{step * axis.every:g}", PALE, anchor="end")
    first = -(-depths[0] // picture.every_depth) * picture.every_depth
    for depth in range(first, depths[-1] + 1, picture.every_depth):
        yield svg_text(to_xy(depth, 0)[0], HEIGHT - BOTTOM + 22, f"{depth}", PALE, anchor="middle")
    yield svg_text((left + right) / 2, HEIGHT - 8, "layers", PALE, anchor="middle")
    for strategy in picture.strategies:
        for name, dashes in ((axis.key, "none"), (f"predicted {axis.key}", "3 4")):
            if points := [
                to_xy(depth, values[strategy, depth, name]) for depth in depths if (strategy, depth, name) in values
            ]:
                yield svg_polyline(points, COLORS[strategy], dashes)
        for depth in (depth for depth in depths if strategy in picture.depths[depth]):
            x, y = to_xy(depth, values[strategy, depth, axis.key])
            fill = COLORS[strategy] if picture.depths[depth][strategy]["fits"] else EMPTY
            yield f'<circle cx="{x}" cy="{y}" r="4" fill="{fill}" stroke="{COLORS[strategy]}" stroke-width="1.5"/>'
    for depth in (depth for depth in depths if BEST in picture.depths[depth]):
        x, y = to_xy(depth, values[BEST, depth, axis.key])
        yield f'<circle cx="{x}" cy="{y}" r="8" fill="none" stroke="{INK}" stroke-width="1.5"/>'


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    lines = results_file.read(Path(sys.argv[1]))
    picture = measured_picture(lines) if lines[0]["benchmark"] == "hsdp" else simulated_picture(lines)
    Path(sys.argv[2]).write_text("\n".join(draw(picture)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
