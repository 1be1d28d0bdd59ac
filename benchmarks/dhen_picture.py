"""Samples a second and memory of DHEN by depth, in one picture: measured in the lab, or as published, simulated.

    python -m benchmarks.dhen_picture RESULTS PICTURE

RESULTS is a file of benchmarks.hsdp, of which the first setting is drawn, or of benchmarks.dhen_published.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.sharding_picture import EMPTY, INK, PALE, path, text

COLORS = {"DDP": "#8250df", "HSDP": "#0969da", "FSDP": "#bc4c00", "fully_shard 2-D": "#57606a"}
WIDTH, HEIGHT, TOP, BOTTOM = 860, 420, 72, 52
PANELS = ((76, 430), (500, 850))  # left and right of each
BEST = "best"
Values = Mapping[str, Any]  # of a way at a depth: what is drawn by name, whether it "fits", and predictions


@dataclass(frozen=True, slots=True)
class Axis:
    """What is drawn upwards, and a line at every so many."""

    what: str
    title: str
    every: float
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    note: str
    axes: tuple[Axis, Axis]
    depths: Mapping[int, Mapping[str, Values]]  # by way, and what was chosen as the best
    every_depth: int

    @property
    def ways(self) -> list[str]:
        return [way for way in COLORS if any(way in ways for ways in self.depths.values())]


def simulated(lines: Sequence[Mapping[str, Any]]) -> Picture:
    return Picture(
        "DHEN on 256 A100s by depth, simulated",
        "filled: fits beside 8 GB of tables; hollow: does not; ring: what the planner takes",
        (
            Axis("samples_per_second", "million samples/s", 0.5, 1e-6),
            Axis("gigabytes", "GB of a rank, dense part", 10.0),
        ),
        {
            line["layers"]: {way: line[way] for way in (*COLORS, BEST) if way in line}
            for line in lines
            if "layers" in line
        },
        8,
    )


def measured(lines: Sequence[Mapping[str, Any]]) -> Picture:
    setting, depths = lines[0]["setting"], dict[int, dict[str, Values]]()
    for line in (line for line in lines if line["setting"] == setting and "depth" in line):
        ways = depths.setdefault(line["depth"], {})
        if "side" in line:
            found = {"rate": line["samples_s"], "bytes": line["most_mb"], "fits": line["fits"]}
            if "predicted_ms" in line:
                found["predicted rate"] = line["samples_s"] * line["ms"][0] / line["predicted_ms"]
                found["predicted bytes"] = line["predicted_mb"]
            ways[line["side"]] = found
        elif line["chosen"] in ways:
            ways[BEST] = ways[line["chosen"]]
    return Picture(
        f"DHEN by depth, lab {setting}, hosts and links emulated",
        "filled: within the budget; hollow: not; dashes: predicted; ring: what the planner takes",
        (Axis("rate", "thousand samples/s", 1.0, 1e-3), Axis("bytes", "MB of a rank at most", 50.0)),
        depths,
        4,
    )


def drawn(picture: Picture) -> Iterator[str]:
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{EMPTY}"/>'
    yield text(PANELS[0][0], 24, picture.title, size=15)
    yield text(PANELS[0][0], 42, picture.note, PALE)
    for number, way in enumerate(picture.ways):
        x = PANELS[1][0] + 40 + 72 * number
        yield f'<circle cx="{x}" cy="20" r="5" fill="{COLORS[way]}"/>'
        yield text(x + 10, 24, way)
    for sides, axis in zip(PANELS, picture.axes, strict=True):
        yield from panel(picture, sides, axis)
    yield "</svg>"


def panel(picture: Picture, sides: tuple[int, int], axis: Axis) -> Iterator[str]:
    left, right = sides
    depths = sorted(picture.depths)
    values = {
        (way, depth, name): axis.scale * ways[way][name]
        for depth, ways in picture.depths.items()
        for way in (*picture.ways, BEST)
        for name in (axis.what, f"predicted {axis.what}")
        if way in ways and name in ways[way]
    }
    most = 1.08 * max(values.values())

    def at(depth: float, value: float) -> tuple[float, float]:
        x = left + (right - left) * (depth - depths[0] + 2) / (depths[-1] - depths[0] + 4)
        return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / most, 1)

    yield text(left, TOP - 8, axis.title, PALE)
    for step in range(int(most / axis.every) + 1):
        x, y = left, at(0, step * axis.every)[1]
        yield f'<line x1="{x}" y1="{y}" x2="{right}" y2="{y}" stroke="{PALE}" stroke-opacity="0.25"/>'
        yield text(x - 6, y + 4, f"{step * axis.every:g}", PALE, anchor="end")
    first = -(-depths[0] // picture.every_depth) * picture.every_depth
    for depth in range(first, depths[-1] + 1, picture.every_depth):
        yield text(at(depth, 0)[0], HEIGHT - BOTTOM + 22, f"{depth}", PALE, anchor="middle")
    yield text((left + right) / 2, HEIGHT - 8, "layers", PALE, anchor="middle")
    for way in picture.ways:
        for name, dashes in ((axis.what, "none"), (f"predicted {axis.what}", "3 4")):
            if along := [at(depth, values[way, depth, name]) for depth in depths if (way, depth, name) in values]:
                yield path(along, COLORS[way], dashes)
        for depth in (depth for depth in depths if way in picture.depths[depth]):
            x, y = at(depth, values[way, depth, axis.what])
            inside = COLORS[way] if picture.depths[depth][way]["fits"] else EMPTY
            yield f'<circle cx="{x}" cy="{y}" r="4" fill="{inside}" stroke="{COLORS[way]}" stroke-width="1.5"/>'
    for depth in (depth for depth in depths if BEST in picture.depths[depth]):
        x, y = at(depth, values[BEST, depth, axis.what])
        yield f'<circle cx="{x}" cy="{y}" r="8" fill="none" stroke="{INK}" stroke-width="1.5"/>'


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    lines = results_file.read(Path(sys.argv[1]))
    made = measured(lines) if lines[0]["benchmark"] == "hsdp" else simulated(lines)
    Path(sys.argv[2]).write_text("\n".join(drawn(made)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
