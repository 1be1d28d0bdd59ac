"""What the runs of benchmarks/dhen_quality.py say: differences of NE with their intervals, the paper's beside them."""

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.click_quality import interval
from benchmarks.dhen_cases import CASES, DEPTHS, DHEN, RIVALS, stack

# The paper's, where neither operations nor numbers of layers are those of the lines they stand in.
TABLE_1 = MappingProxyType(  # NE against DCN in % after 10, 20 and 35 G samples, 5 layers
    {
        "stack dcn 2": (0.0, 0.0, 0.0),
        "stack attention 2": (0.036, 0.026, -1.044),
        "stack convolution 2": (-1.441, -1.535, -1.534),
        "stack linear 2": (-1.461, -1.546, -1.538),
        "dcn + linear 2": (-0.002, -0.004, -0.004),
        "attention + linear 2": (-1.363, -1.537, -1.576),
        "attention + convolution 2": (0.024, -1.270, -1.508),
    }
)
TABLE_2 = (
    MappingProxyType(  # NE of AdvancedDLRM + linear against one AdvancedDLRM after 5, 15 and 25 G samples, by layers
        {2: (-0.0315, -0.134, -0.176), 4: (-0.071, -0.197, -0.255), 8: (-0.068, -0.208, -0.273)}
    )
)
# After 50 G samples NE of DHEN against AdvancedDLRM less that of experts nearest in operations, by layers.
TABLE_3 = MappingProxyType({2: -0.11 + 0.06, 4: -0.21 + 0.09, 6: -0.26 + 0.1})
PAIRS = ("dlrm + linear", "dlrm + dcn_v2")
CLAIM = "DHEN against rivals of equal operations"
Line = dict[str, Any]


def comparisons() -> Iterator[tuple[str, str, str, Any]]:
    """(what for, case, against, what the paper has)."""
    for rival in RIVALS:
        yield CLAIM, DHEN, rival, None
    for rival in RIVALS:
        yield "AdvancedDLRM + linear against the same", "dlrm + linear 2", rival, None
    for name, paper in TABLE_1.items():
        yield "table 1: seven combinations, against DCN", name, "stack dcn 2", paper
    for pair in PAIRS:
        for depth in DEPTHS:
            name, paper = f"{pair} {depth}", TABLE_2.get(depth) if pair == PAIRS[0] else None
            yield "table 2: deeper, against one AdvancedDLRM", name, stack(1), paper
            yield "not in the paper: against as many AdvancedDLRM", name, stack(depth), None
            yield "deeper, against DLRM", name, "dlrm", None
        for depth in DEPTHS[1:]:
            yield (
                "table 3: against experts of equal operations",
                f"{pair} {depth}",
                f"dlrm, experts {depth}",
                TABLE_3[depth],
            )
    for name in (name for name in CASES if "," in name and " + " in name):
        yield "not in the paper: ensembles of equal operations, against the sum", name, name.split(",")[0], None
    for depth in DEPTHS[1:]:
        yield "experts, against DLRM", f"dlrm, experts {depth}", "dlrm", None
    for name in ("dlrm + dcn_v2 + linear 2", "fm + linear 2"):
        yield "other modules, against AdvancedDLRM alone", name, stack(), None


def summaries(lines: list[Line], folder: Path) -> Iterator[Line]:
    """A line for each comparison whose runs are there, the NE of each case first."""
    data = lines[0]["data"]
    runs = {(line["case"], line["seed"]): line for line in lines}
    yield {"data": data, "ne": _means(lines)}
    for what, case, against, paper in comparisons():
        seeds = [seed for seed in sorted({seed for _, seed in runs}) if {(case, seed), (against, seed)} <= runs.keys()]
        if case != against and seeds:
            pairs = [(runs[case, seed], runs[against, seed]) for seed in seeds]
            line = {"data": data, "for": what, "case": case, "against": against, "seeds": len(seeds)}
            line |= {"flops_ratio": round(pairs[0][0]["forward_flops"] / pairs[0][1]["forward_flops"], 3)}
            kept = [pair for pair in pairs if all((folder / f"{one['digest']}.npy").exists() for one in pair)]
            line |= {"ne_percent": _relative(pairs)}
            line |= {"ne_percent_by_sample": {p[0]["seed"]: _by_sample(*p, folder) for p in kept}} if kept else {}
            yield line | ({"paper_ne_percent": paper} if paper else {})
    yield from _orders(lines)


def claim(lines: list[Line], folder: Path) -> Line:
    """Whether DHEN beats every rival of equal operations by more than the interval; None: runs are missing."""
    found = [line for line in summaries(lines, folder) if line.get("for") == CLAIM]
    last = {line["against"]: list(line["ne_percent"].values())[-1] for line in found if line["seeds"] > 1}
    beaten = {rival: last[rival][0] + last[rival][1] < 0 for rival in RIVALS if rival in last}
    missing = [rival for rival in RIVALS if rival not in last]
    return {"claim": "DHEN beats every rival of equal operations", "beaten": beaten, "missing": missing}


def by_rates(lines: list[Line]) -> Iterator[Line]:
    """The last NE of each case by its rates, with those that gave its best; then the same of all cases' mean."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        dense, tables = line["rates"]
        found.setdefault(line["case"], {})[f"{dense} {tables}"] = round(line["points"][-1]["ne"], 5)
    alike = set.intersection(*(set(each) for each in found.values()))
    found["mean"] = {rates: round(mean(each[rates] for each in found.values()), 5) for rates in sorted(alike)}
    for case, each in found.items():
        yield {"rates of": case, "ne": each, "best": min(each, key=each.__getitem__, default=None)}


def _orders(lines: list[Line]) -> Iterator[Line]:
    """The combinations of table 1, best first, after as many samples as all were trained on."""
    seeds = [{line["seed"] for line in lines if line["case"] == case} for case in TABLE_1]
    common = set.intersection(*seeds)
    means = _means([line for line in lines if line["case"] in TABLE_1 and line["seed"] in common]) if common else {}
    for samples, ours in reversed(means.items()):
        if ours.keys() >= TABLE_1.keys():
            paper = sorted(TABLE_1, key=lambda case: TABLE_1[case][-1])
            yield {"for": "table 1: best first", "samples": int(samples), "ours": [*ours], "paper": paper}
            return


def _means(lines: list[Line]) -> dict[str, dict[str, float]]:
    """The mean NE of each case at each point, best first."""
    found: dict[str, dict[str, float]] = {}
    for at, point in enumerate(max((line["points"] for line in lines), key=len)):
        each: dict[str, list[float]] = {}
        for line in lines:
            if at < len(line["points"]):
                each.setdefault(line["case"], []).append(line["points"][at]["ne"])
        means = {case: round(mean(values), 5) for case, values in each.items()}
        found[str(point["samples"])] = dict(sorted(means.items(), key=lambda item: item[1]))
    return found


def _relative(pairs: list[tuple[Line, Line]]) -> dict[str, list[float]]:
    """By samples trained on: the mean difference of NE in % over seeds, and half of its 95 % interval."""
    found: dict[str, list[float]] = {}
    for at in range(_points(pairs[0])):
        ne = [(mine["points"][at]["ne"], theirs["points"][at]["ne"]) for mine, theirs in pairs]
        differences = interval([100 * (mine / theirs - 1) for mine, theirs in ne])
        found[str(pairs[0][0]["points"][at]["samples"])] = [round(value, 4) for value in differences]
    return found


def _by_sample(one: Line, other: Line, folder: Path) -> list[float]:
    """At the last point of a single seed: the difference in %, and half of its interval over held-out samples."""
    last = _points((one, other)) - 1
    mine, theirs = (np.load(folder / f"{line['digest']}.npy")[last].astype(np.float64) for line in (one, other))
    differences = 100 * (mine - theirs) / theirs.mean()
    half = 1.96 * differences.std(ddof=1) / len(differences) ** 0.5
    return [round(float(differences.mean()), 4), round(float(half), 4)]


def _points(pair: tuple[Line, Line]) -> int:
    """That both have."""
    return min(len(line["points"]) for line in pair)
