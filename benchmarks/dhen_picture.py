"""Samples a second and memory by depth of benchmarks/dhen_published.py, simulated, in one picture.

python -m benchmarks.dhen_picture benchmarks/results/dhen_published-simulated.json docs/dhen-depths.svg
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sharding_picture import EMPTY, INK, PALE, path, text

WAYS = ("DDP", "HSDP", "FSDP")
COLORS = ("#8250df", "#0969da", "#bc4c00")
WIDTH, HEIGHT, TOP, BOTTOM = 860, 420, 72, 52
PANELS = ((76, 430), (500, 850))  # left and right of each
Lines = Sequence[dict[str, Any]]


def drawn(lines: Lines) -> Iterator[str]:
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{EMPTY}"/>'
    yield text(PANELS[0][0], 24, "DHEN on 256 A100s by depth, simulated", size=15)
    yield text(
        PANELS[0][0], 42, "filled: fits beside 8 GB of tables; hollow: does not; ring: what the planner takes", PALE
    )
    for number, (name, color) in enumerate(zip(WAYS, COLORS, strict=True)):
        x = PANELS[1][0] + 40 + 100 * number
        yield f'<circle cx="{x}" cy="20" r="5" fill="{color}"/>'
        yield text(x + 10, 24, name)
    yield from panel(lines, PANELS[0], "samples_per_second", 1e-6, 0.5, "million samples/s")
    yield from panel(lines, PANELS[1], "gigabytes", 1.0, 10.0, "GB of a rank, dense part")
    yield "</svg>"


def panel(lines: Lines, sides: tuple[int, int], what: str, scale: float, every: float, title: str) -> Iterator[str]:
    left, right = sides
    depths = [line["layers"] for line in lines]
    most = 1.08 * max(scale * line[way][what] for line in lines for way in WAYS)

    def at(depth: float, value: float) -> tuple[float, float]:
        x = left + (right - left) * (depth - depths[0] + 2) / (depths[-1] - depths[0] + 4)
        return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / most, 1)

    yield text(left, TOP - 8, title, PALE)
    for step in range(int(most / every) + 1):
        x, y = left, at(0, step * every)[1]
        yield f'<line x1="{x}" y1="{y}" x2="{right}" y2="{y}" stroke="{PALE}" stroke-opacity="0.25"/>'
        yield text(x - 6, y + 4, f"{step * every:g}", PALE, anchor="end")
    for depth in range(depths[0], depths[-1] + 1, 8):
        yield text(at(depth, 0)[0], HEIGHT - BOTTOM + 22, f"{depth}", PALE, anchor="middle")
    yield text((left + right) / 2, HEIGHT - 8, "layers", PALE, anchor="middle")
    for way, color in zip(WAYS, COLORS, strict=True):
        points = [at(line["layers"], scale * line[way][what]) for line in lines]
        yield path(points, color)
        for line, (x, y) in zip(lines, points, strict=True):
            inside = color if line[way]["fits"] else EMPTY
            yield f'<circle cx="{x}" cy="{y}" r="4" fill="{inside}" stroke="{color}" stroke-width="1.5"/>'
            if line["chosen"] == way:
                yield f'<circle cx="{x}" cy="{y}" r="8" fill="none" stroke="{INK}" stroke-width="1.5"/>'


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    Path(sys.argv[2]).write_text("\n".join(drawn([line for line in lines if "layers" in line])) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
