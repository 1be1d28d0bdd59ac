"""Summaries of runs of benchmarks/dhen_quality.py: differences of NE with intervals, and those of the paper."""

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.click_quality import interval
from benchmarks.dhen_cases import CASES, DEPTHS, DHEN, RIVALS, stack

# The paper's values; its models have other numbers of operations and layers than ours.
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
# NE of DHEN against AdvancedDLRM after 50 G samples, minus that of the experts nearest in operations, by layers.
TABLE_3 = MappingProxyType({2: -0.11 + 0.06, 4: -0.21 + 0.09, 6: -0.26 + 0.1})
PAIRS = ("dlrm + linear", "dlrm + dcn_v2")
CLAIM = "DHEN against rivals of equal operations"
BALANCED = "balanced experts, against experts without a balance loss"
Line = dict[str, Any]


def comparisons() -> Iterator[tuple[str, str, str, Any]]:
    """(comparison, case, rival, the paper's values)."""
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
    yield BALANCED, "dlrm, balanced experts 2", "dlrm, experts 2", None
    yield BALANCED, "dlrm, balanced experts 2, its rates", "dlrm, experts 2, its rates", None
    for name in ("dlrm + dcn_v2 + linear 2", "fm + linear 2"):
        yield "other modules, against AdvancedDLRM alone", name, stack(), None


def summaries(lines: list[Line], folder: Path) -> Iterator[Line]:
    """The NE of each case, then a line for each comparison whose runs exist."""
    data = lines[0]["data"]
    runs = {(line["case"], line["seed"]): line for line in lines}
    yield {"data": data, "ne": _means(lines)}
    for comparison, case, against, paper in comparisons():
        seeds = [seed for seed in sorted({seed for _, seed in runs}) if {(case, seed), (against, seed)} <= runs.keys()]
        if case != against and seeds:
            pairs = [(runs[case, seed], runs[against, seed]) for seed in seeds]
            line = {"data": data, "for": comparison, "case": case, "against": against, "seeds": len(seeds)}
            line |= {"flops_ratio": round(pairs[0][0]["forward_flops"] / pairs[0][1]["forward_flops"], 3)}
            saved = [pair for pair in pairs if all((folder / f"{run['digest']}.npy").exists() for run in pair)]
            line |= {"ne_percent": _relative(pairs)}
            line |= {"ne_percent_by_sample": {p[0]["seed"]: _by_sample(*p, folder) for p in saved}} if saved else {}
            yield line | ({"paper_ne_percent": paper} if paper else {})
    yield from _table_1_order(lines)


def claim(lines: list[Line], folder: Path) -> Line:
    """Whether DHEN beats every rival of equal operations by more than the interval; None: runs are missing."""
    rows = [line for line in summaries(lines, folder) if line.get("for") == CLAIM]
    last = {line["against"]: list(line["ne_percent"].values())[-1] for line in rows if line["seeds"] > 1}
    beaten = {rival: last[rival][0] + last[rival][1] < 0 for rival in RIVALS if rival in last}
    missing = [rival for rival in RIVALS if rival not in last]
    return {"claim": "DHEN beats every rival of equal operations", "beaten": beaten, "missing": missing}


def by_rates(lines: list[Line]) -> Iterator[Line]:
    """The last NE of each case by learning rates, with the best rates; then the same for the mean of all cases."""
    ne_by_case: dict[str, dict[str, float]] = {}
    for line in lines:
        dense, tables = line["rates"]
        ne_by_case.setdefault(line["case"], {})[f"{dense} {tables}"] = round(line["points"][-1]["ne"], 5)
    common = set.intersection(*(set(ne) for ne in ne_by_case.values()))
    ne_by_case["mean"] = {rates: round(mean(ne[rates] for ne in ne_by_case.values()), 5) for rates in sorted(common)}
    for case, ne in ne_by_case.items():
        yield {"rates of": case, "ne": ne, "best": min(ne, key=ne.__getitem__, default=None)}


def _table_1_order(lines: list[Line]) -> Iterator[Line]:
    """The combinations of table 1, best first, at the largest number of samples that all were trained on."""
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
    by_point: dict[str, dict[str, float]] = {}
    for index, point in enumerate(max((line["points"] for line in lines), key=len)):
        by_case: dict[str, list[float]] = {}
        for line in lines:
            if index < len(line["points"]):
                by_case.setdefault(line["case"], []).append(line["points"][index]["ne"])
        means = {case: round(mean(values), 5) for case, values in by_case.items()}
        by_point[str(point["samples"])] = dict(sorted(means.items(), key=lambda item: item[1]))
    return by_point


def _relative(pairs: list[tuple[Line, Line]]) -> dict[str, list[float]]:
    """By number of training samples: the mean difference of NE in % over seeds, and half of its 95 % interval."""
    by_point: dict[str, list[float]] = {}
    for index in range(_num_points(pairs[0])):
        ne = [(run["points"][index]["ne"], rival["points"][index]["ne"]) for run, rival in pairs]
        differences = interval([100 * (run / rival - 1) for run, rival in ne])
        by_point[str(pairs[0][0]["points"][index]["samples"])] = [round(value, 4) for value in differences]
    return by_point


def _by_sample(case: Line, rival: Line, folder: Path) -> list[float]:
    """For one seed, at the last point: the difference in %, and half of its interval over held-out samples."""
    last = _num_points((case, rival)) - 1
    ours, theirs = (np.load(folder / f"{line['digest']}.npy")[last].astype(np.float64) for line in (case, rival))
    differences = 100 * (ours - theirs) / theirs.mean()
    half = 1.96 * differences.std(ddof=1) / len(differences) ** 0.5
    return [round(float(differences.mean()), 4), round(float(half), 4)]


def _num_points(pair: tuple[Line, Line]) -> int:
    """The number of points that both runs have."""
    return min(len(line["points"]) for line in pair)
