"""The figures that FasterMoE and UltraEP publish, the same figures of simulated runs, and why they differ."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.fastermoe_runs import Run, layer_gains
from benchmarks.fastermoe_schedule import ZERO_2, ZERO_3

CLUSTERS = ("johnny", "trevor")
TOLERANCE = 0.2
AS_ASSUMED = "as assumed"
SHADOWS, BOTH, OVER_ZERO = "shadows over FastMoE", "both over FastMoE", "both over ZeRO-3, most"
PAPER = {
    f"{SHADOWS}, johnny": 1.95,
    f"{SHADOWS}, trevor": 4.74,
    "schedule over FastMoE": 1.40,
    f"{BOTH}, johnny": 2.20,
    f"{BOTH}, trevor": 5.72,
    f"{OVER_ZERO}, johnny": 6.63,
    f"{OVER_ZERO}, trevor": 17.87,
    "both over ZeRO-2, most": 3.94,
    "percent of experts shadowed": 19.0,
    "shadows over FastMoE with one shadow, most": 1.97,
    "bound of the schedule in a layer, most": 1.71,
    "schedule over FastMoE in a layer, most": 1.42,
    "percent of the bound in a layer, most": 99.0,
}
ULTRAEP_CLAIM, ULTRAEP = "UltraEP: percent of the force-balanced ideal", 94.6


def figures(runs: Sequence[Run], both: str = "shadows, steps", *, equations: bool = False) -> dict[str, float]:
    """The figures of PAPER: means over the models of a cluster, except where it says most.

    `both`: the side to take for shadows and schedule together. `equations`: only those that Equations 7 and 8 give.
    """
    values = dict[str, float]()
    for cluster in CLUSTERS:
        own = [run for run in runs if run.model.cluster_name == cluster]
        if equations:
            values[f"{SHADOWS}, {cluster}"] = mean(run.seconds("equation 7") / run.seconds("equation 8") for run in own)
            continue
        values[f"{SHADOWS}, {cluster}"] = mean(run.gain("shadows") for run in own)
        values[f"{BOTH}, {cluster}"] = mean(run.gain(both) for run in own)
        values[f"{OVER_ZERO}, {cluster}"] = max(run.data_parallel_seconds(ZERO_3) / run.seconds(both) for run in own)
    if equations:
        return values
    layers = [pair for run in runs for pair in zip(*layer_gains(run.values), strict=True)]
    one_shadow = [
        gain
        for run in runs
        for gain in (run.values["plain"] / run.values["shadows"])[run.values["shadowed"] == 1].tolist()
    ]
    return values | {
        "schedule over FastMoE": mean(run.gain("steps") for run in runs),
        "both over ZeRO-2, most": max(run.data_parallel_seconds(ZERO_2) / run.seconds(both) for run in runs),
        "percent of experts shadowed": 100 * mean(run.shadowed_share for run in runs),
        "shadows over FastMoE with one shadow, most": max(one_shadow, default=0.0),
        "bound of the schedule in a layer, most": max(bound for bound, _ in layers),
        "schedule over FastMoE in a layer, most": max(gain for _, gain in layers),
        "percent of the bound in a layer, most": max(100 * gain / bound for bound, gain in layers),
    }


def claim_line(
    name: str, paper: float, simulated: float, ours: float | None, alternatives: Mapping[str, float], note: str = ""
) -> dict[str, Any]:
    """The published figure next to the simulated one, with a reason if they differ by more than TOLERANCE."""
    line = {"what": "claim", "figure": name, "paper": paper, "simulated": round(simulated, 2)}
    line |= {"ours": None if ours is None else round(ours, 2), "simulated_over_paper": round(simulated / paper, 2)}
    if abs(simulated / paper - 1) <= TOLERANCE:
        return line
    assumed = alternatives.get(AS_ASSUMED, 0.0)
    rounded = {
        assumption: round(value, 2)
        for assumption, value in alternatives.items()
        if assumption == AS_ASSUMED or abs(value - assumed) > 0.02 * assumed
    }
    text = reason(paper, simulated, rounded)
    return line | {"alternatives": rounded, "reason": f"{text}; {note}" if note else text}


def reason(paper: float, simulated: float, alternatives: Mapping[str, float]) -> str:
    """The assumption whose figure is closest to the paper's by ratio."""

    def distance(value: float) -> float:
        return max(value / paper, paper / value) if value > 0 else float("inf")

    closest = min(alternatives, key=lambda assumption: distance(alternatives[assumption]))
    if closest == AS_ASSUMED or distance(alternatives[closest]) >= distance(simulated):
        return "none of the alternatives is closer"
    value = alternatives[closest]
    share = "within" if distance(value) <= 1 + TOLERANCE else "still not within"
    return f"{closest}: {value:g}, {share} {TOLERANCE:.0%}"


def zero_note(name: str, paper: float, runs: Sequence[Run]) -> str:
    """Of claims over ZeRO: the rate at which its collectives would give the paper's figure, for one of the models."""
    collectives = ZERO_3 if "ZeRO-3" in name else ZERO_2 if "ZeRO-2" in name else 0
    if not collectives:
        return ""
    own = [run for run in runs if run.model.cluster_name in name] or runs
    shares = (implied_rate(run, paper, collectives) for run in own)
    return f"collectives at {max(shares):.0%} of the links' rate would give the paper's figure"


def implied_rate(run: Run, paper: float, collectives: int) -> float:
    """The share of the links' rate at which data parallelism takes `paper` times as long as both methods."""
    gathers = run.data_parallel_seconds(collectives) - run.data_parallel_seconds(0)
    return gathers / (paper * run.seconds("shadows, steps") - run.data_parallel_seconds(0))
