"""Draw the weak scaling of benchmarks/sharding.py, measured and simulated, as an SVG picture.

python -m benchmarks.sharding_picture benchmarks/results/sharding-2cores.json docs/sharding-scaling.svg
"""

import sys
from collections.abc import Iterator, Sequence
from math import log2
from pathlib import Path

from benchmarks import results_file

MEASURED = {"lab 1 x 1": 1, "lab 2 x 1": 2, "lab 2 x 2": 4}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 76, 28, 56, 52
INK, PALE, LINE, EMPTY = "#24292f", "#8c959f", "#0969da", "#ffffff"
Points = Sequence[tuple[int, int]]  # (ranks, samples/s)


def read_points(path: Path) -> tuple[Points, Points]:
    """Read the measured and the simulated points of a results file."""
    lines = results_file.read(path)
    measured = {line["setting"]: line["samples_s"] for line in lines if line.get("side") == "overlapped"}
    simulated = [(line["ranks"], line["samples_s"]) for line in lines if line["setting"] == "simulated"]
    return [(ranks, measured[setting]) for setting, ranks in MEASURED.items()], simulated


def svg_lines(measured: Points, simulated: Points) -> Iterator[str]:
    all_points = [*measured, *simulated]
    max_ranks = max(ranks for ranks, _ in all_points)
    first_ranks, first_rate = measured[0]
    ideal = first_rate * max_ranks / first_ranks
    low_rate, high_rate = min(rate for _, rate in all_points) / 1.3, ideal * 1.1

    def to_xy(ranks: float, rate: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (log2(ranks) + 0.2) / (log2(max_ranks) + 0.4)
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * log2(rate / low_rate) / log2(high_rate / low_rate)
        return round(x, 1), round(y, 1)

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{EMPTY}"/>'
    yield svg_text(LEFT, 24, "Samples per second by number of ranks, local batch size 4,096", size=15)
    note = "filled: measured in the lab (emulated hosts and links); hollow: simulated; dashed: linear scaling"
    yield svg_text(LEFT, 42, note, PALE)
    rate = 2 ** int(log2(low_rate) + 1)
    while rate < high_rate:
        (x, y), (end, _) = to_xy(1, rate), to_xy(max_ranks, rate)
        yield f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="{PALE}" stroke-opacity="0.25"/>'
        yield svg_text(LEFT - 8, y + 4, f"{rate:,}", PALE, anchor="end")
        rate *= 2
    for ranks, _ in all_points:
        yield svg_text(to_xy(ranks, low_rate)[0], HEIGHT - BOTTOM + 22, f"{ranks}", PALE, anchor="middle")
    yield svg_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "ranks", PALE, anchor="middle")
    yield svg_polyline([to_xy(first_ranks, first_rate), to_xy(max_ranks, ideal)], PALE, "5 5")
    yield svg_polyline([to_xy(*point) for point in measured], LINE)
    yield svg_polyline([to_xy(*point) for point in (measured[-1], *simulated)], LINE, "2 4")
    for point in all_points:
        x, y = to_xy(*point)
        fill = LINE if point in measured else EMPTY
        yield f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}" stroke="{LINE}" stroke-width="2"/>'
        yield svg_text(x, y + 22, f"{point[1]:,}", INK, anchor="middle")
    yield "</svg>"


def svg_text(x: float, y: float, content: str, color: str = INK, *, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}" font-size="{size}">{content}</text>'


def svg_polyline(points: Sequence[tuple[float, float]], color: str, dashes: str = "none") -> str:
    xy = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{xy}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/>'


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    measured, simulated = read_points(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text("\n".join(svg_lines(measured, simulated)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
