"""Picture of benchmarks/fastermoe.py: gains over plain expert parallelism of table 2's models, all simulated.

python -m benchmarks.fastermoe_picture benchmarks/results/fastermoe.json docs/models/fastermoe-gains.svg
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.sharding_picture import EMPTY, INK, PALE, svg_text

COLORS = {"shadows": "#bc4c00", "steps": "#8250df", "shadows, steps": "#0969da", "ours": "#1a7f37"}
NAMES = {"shadows": "shadows", "steps": "schedule", "shadows, steps": "both", "ours": "ours"}
PUBLISHED = "both over FastMoE"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 400, 56, 20, 72, 48
GAP = 28  # between models


def draw(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    models = [line for line in lines if line["what"] == "model"]
    published = {line["figure"]: line["paper"] for line in lines if line["what"] == "claim"}
    most = 1.1 * max(
        *(line["gain"][side] for line in models for side in (*COLORS, "even routing")),
        *published_gains(models, published),
    )
    width = (WIDTH - LEFT - RIGHT) / len(models)

    def to_y(gain: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * gain / most, 1)

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{EMPTY}"/>'
    yield svg_text(LEFT, 24, "MoE layers, forward and backward: gain over plain expert parallelism, simulated", size=15)
    yield svg_text(
        LEFT, 44, "dashed: both methods as published, johnny and trevor; black: even routing, the ideal", PALE
    )
    for number, (side, color) in enumerate(COLORS.items()):
        x = WIDTH - RIGHT - 84 * (len(COLORS) - number)
        yield f'<rect x="{x}" y="{TOP - 22}" width="10" height="10" fill="{color}"/>'
        yield svg_text(x + 15, TOP - 12, NAMES[side])
    for gain in range(int(most) + 1):
        yield level_line((LEFT, WIDTH - RIGHT), to_y(gain), 'stroke-opacity="0.15"')
        yield svg_text(LEFT - 8, to_y(gain) + 4, f"{gain}", PALE, anchor="end")
    for number, (line, paper) in enumerate(zip(models, published_gains(models, published), strict=True)):
        left, bar = LEFT + number * width + GAP / 2, (width - GAP) / len(COLORS)
        for position, (side, color) in enumerate(COLORS.items()):
            x, y = round(left + position * bar, 1), to_y(line["gain"][side])
            yield f'<rect x="{x}" y="{y}" width="{bar - 2:.1f}" height="{to_y(0) - y:.1f}" fill="{color}"/>'
        yield level_line((left, left + width - GAP), to_y(paper), 'stroke-dasharray="4 3"')
        yield level_line((left, left + width - GAP), to_y(line["gain"]["even routing"]), "")
        yield svg_text(
            left + (width - GAP) / 2, HEIGHT - BOTTOM + 20, line["model"].removeprefix("MoE-"), anchor="middle"
        )
        yield svg_text(left + (width - GAP) / 2, HEIGHT - BOTTOM + 38, line["cluster"], PALE, anchor="middle")
    yield "</svg>"


def level_line(sides: tuple[float, float], y: float, style: str) -> str:
    left, right = sides
    return f'<line x1="{left:.1f}" y1="{y}" x2="{right:.1f}" y2="{y}" stroke="{INK}" stroke-width="2" {style}/>'


def published_gains(models: Sequence[Mapping[str, Any]], published: Mapping[str, float]) -> list[float]:
    return [published[f"{PUBLISHED}, {line['cluster']}"] for line in models]


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    Path(sys.argv[2]).write_text("\n".join(draw(results_file.read(Path(sys.argv[1])))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
