"""Weak scaling of benchmarks/sharding.py, measured and simulated, in one picture.

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
Points = Sequence[tuple[int, int]]  # ranks, samples/s


def points(path: Path) -> tuple[Points, Points]:
    """Measured and simulated."""
    lines = results_file.read(path)
    ours = {line["setting"]: line["samples_s"] for line in lines if line.get("side") == "overlapped"}
    simulated = [(line["ranks"], line["samples_s"]) for line in lines if line["setting"] == "simulated"]
    return [(ranks, ours[setting]) for setting, ranks in MEASURED.items()], simulated


def drawn(measured: Points, simulated: Points) -> Iterator[str]:
    everything = [*measured, *simulated]
    most_ranks = max(ranks for ranks, _ in everything)
    first_ranks, first = measured[0]
    ideal = first * most_ranks / first_ranks
    low, high = min(rate for _, rate in everything) / 1.3, ideal * 1.1

    def at(ranks: float, rate: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (log2(ranks) + 0.2) / (log2(most_ranks) + 0.4)
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * log2(rate / low) / log2(high / low)
        return round(x, 1), round(y, 1)

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{EMPTY}"/>'
    yield text(LEFT, 24, "Samples a second as ranks are added, 4,096 samples a rank and step", size=15)
    yield text(
        LEFT, 42, "filled: measured in the lab (emulated hosts and links); hollow: simulated; dashed: as if free", PALE
    )
    rate = 2 ** int(log2(low) + 1)
    while rate < high:
        (x, y), (end, _) = at(1, rate), at(most_ranks, rate)
        yield f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="{PALE}" stroke-opacity="0.25"/>'
        yield text(LEFT - 8, y + 4, f"{rate:,}", PALE, anchor="end")
        rate *= 2
    for ranks, _ in everything:
        yield text(at(ranks, low)[0], HEIGHT - BOTTOM + 22, f"{ranks}", PALE, anchor="middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "ranks", PALE, anchor="middle")
    yield path([at(first_ranks, first), at(most_ranks, ideal)], PALE, "5 5")
    yield path([at(*one) for one in measured], LINE)
    yield path([at(*one) for one in (measured[-1], *simulated)], LINE, "2 4")
    for one in everything:
        x, y = at(*one)
        inside = LINE if one in measured else EMPTY
        yield f'<circle cx="{x}" cy="{y}" r="5" fill="{inside}" stroke="{LINE}" stroke-width="2"/>'
        yield text(x, y + 22, f"{one[1]:,}", INK, anchor="middle")
    yield "</svg>"


def text(x: float, y: float, said: str, color: str = INK, *, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}" font-size="{size}">{said}</text>'


def path(points: Sequence[tuple[float, float]], color: str, dashes: str = "none") -> str:
    along = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{along}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/>'


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    measured, simulated = points(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text("\n".join(drawn(measured, simulated)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
