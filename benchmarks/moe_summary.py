"""Lines of benchmarks/moe.py from its rounds: one for each side, then summaries against the targets."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.moe_sides import (
    AGAIN,
    ALPHA,
    BALANCED,
    BALANCED_OURS,
    BALANCED_STEPS,
    CHANNELS,
    COMPUTATION,
    MESSAGES,
    OURS,
    PLAIN,
    ROWS,
    SHADOWS,
    SHADOWS_STEPS,
    SIDES,
    STEPS,
)

Line = dict[str, Any]
Point = tuple[float, float]  # predicted, measured
MIN_FLOOR = 0.02  # sides are equal within this, or the A/A floor
TARGETS = {"shadowing_share": 0.85, "schedule_share": 0.8, "ideal_share": 0.9, "over_shadows_steps": 1.0}
ALL = "all"
PARTS = {COMPUTATION: "computation", MESSAGES: "messages"}


def side_lines(rounds: Sequence[Line]) -> Iterator[Line]:
    """A line for each setting, workload and side."""
    for (setting, workload), group in _by_case(rounds).items():
        for name in SIDES:
            measured = [each["sides"][name] for each in group if name in each["sides"]]
            if not measured:
                continue
            seconds, costs = [side["seconds"] for side in measured], [each["costs"] for each in group]
            line = {"benchmark": "moe", "setting": setting, "emulated": "hosts, links, CPU quotas"}
            line |= {"workload": workload, "side": name, "seconds": spread(seconds)}
            if name not in PARTS:
                line |= {"over_plain": spread(_ratios(group, PLAIN, name))}
                line |= {"ideal_share": spread(_ratios(group, BALANCED_STEPS, name))}
            line |= {
                key: round(median(s[key] for s in measured), 3) for key in ("predicted", "bound") if key in measured[0]
            }
            line |= {"predicted_over_measured": spread([side["predicted"] / side["seconds"] for side in measured])}
            for key in ("copies", "most_rows_over_mean", "dropped"):
                line |= {key: [round(side[key], 3) for side in measured]} if key in measured[0] else {}
            line |= {"Pi1": round(median(cost["compute_row"] / cost["send_row"] for cost in costs), 3)}
            line |= {"Pi2": round(ROWS / (ALPHA * CHANNELS), 2)}
            yield line | {"costs": {key: median(cost[key] for cost in costs) for key in costs[0]}}


def summaries(rounds: Sequence[Line]) -> Iterator[Line]:
    """Targets by setting and workload; the predictor by part, for each setting and all; its picks."""
    for (setting, workload), group in _by_case(rounds).items():
        yield {"benchmark": "moe", "kind": "targets", "setting": setting, "workload": workload, **targets(group)}
    settings = [*dict.fromkeys(each["setting"] for each in rounds)]
    for setting in settings + ([ALL] if len(settings) > 1 else []):
        group = [each for each in rounds if setting in (ALL, each["setting"])]
        for part, points in points_by_part(group).items():
            fit = fit_quality(points)
            yield {"benchmark": "moe", "kind": "predictor", "setting": setting, "part": part, **fit}
    cases = [{"setting": s, "workload": w, **p} for (s, w), g in _by_case(rounds).items() if (p := pick(g))]
    if cases:
        share = round(sum(case["within"] for case in cases) / len(cases), 3)
        yield {"benchmark": "moe", "kind": "picks", "cases": len(cases), "within": share, "picks": cases}


def targets(group: Sequence[Line]) -> Line:
    """Figures of one setting and workload, each the median over rounds; `missed`: those below their target.

    Gains are over plain. Of shadowing, modelled by the complete model; of the schedule, the bound: the computation and
    messages of plain, each measured alone, overlapped in both passes.
    """
    wanted = {PLAIN, SHADOWS, STEPS, COMPUTATION, MESSAGES}
    complete = [each["sides"] for each in group if wanted <= {*each["sides"]}]
    figures: Line = {"rounds": len(group), "floor": round(floor_of(group), 4)}
    if complete:
        shadowing = [sides[PLAIN]["predicted"] / sides[SHADOWS]["predicted"] for sides in complete]
        schedule = [sides[PLAIN]["seconds"] / _overlapped(sides) for sides in complete]
        for name, side, gains in (("shadowing_modelled", SHADOWS, shadowing), ("schedule_bound", STEPS, schedule)):
            reached, kind = [sides[PLAIN]["seconds"] / sides[side]["seconds"] for sides in complete], name.split("_")[0]
            shares = [gain / most for gain, most in zip(reached, gains, strict=True)]
            figures |= {name: median(gains), f"{kind}_reached": median(reached), f"{kind}_share": median(shares)}
    for name, above, below in (
        ("ideal_share", BALANCED_STEPS, OURS),
        ("over_shadows_steps", SHADOWS_STEPS, OURS),
        ("balanced_over_plain", BALANCED, BALANCED_OURS),
    ):
        if values := _ratios(group, above, below):
            figures |= {name: median(values)}
    tolerance = max(MIN_FLOOR, figures["floor"])
    goals = TARGETS | {"over_shadows_steps": 1 - tolerance, "balanced_over_plain": 1 - tolerance}
    missed = [name for name, target in goals.items() if name in figures and figures[name] < target]
    return {key: round(value, 4) for key, value in figures.items()} | {"missed": missed}


def _overlapped(sides: Line) -> float:
    """Seconds of plain if its messages overlapped with its computation, a third of which is in forward."""
    computation, messages = sides[COMPUTATION]["seconds"], sides[MESSAGES]["seconds"] / 2
    return max(messages, computation / 3) + max(messages, computation * 2 / 3)


def floor_of(group: Sequence[Line]) -> float:
    """The A/A floor: how far the median ratio of the same side to itself is from 1."""
    again = _ratios(group, PLAIN, AGAIN)
    return abs(median(again) - 1) if again else 0.0


def points_by_part(rounds: Sequence[Line]) -> dict[str, list[Point]]:
    """Predicted and measured seconds of every round: parts of plain, then whole sides."""
    points: dict[str, list[Point]] = {}
    for each in rounds:
        for name, side in each["sides"].items():
            if name == AGAIN:
                continue
            part = "in steps" if SIDES[name].in_steps else PARTS.get(name, "in one step")
            points.setdefault(part, []).append((side["predicted"], side["seconds"]))
    return points


def fit_quality(points: Sequence[Point]) -> Line:
    """R^2 and mean relative error of predictions as they are, and after measured = offset + slope x predicted."""
    predicted, measured = np.array(points).T
    slope, offset = 1.0, 0.0
    if np.ptp(predicted) > 0:
        slope, offset = np.polyfit(predicted, measured, 1)
    fitted = offset + slope * predicted
    figures: Line = {"r2": _r2(predicted, measured), "error": _relative_error(predicted, measured)}
    figures |= {"offset": float(offset), "slope": float(slope)}
    figures |= {"fitted_r2": _r2(fitted, measured), "fitted_error": _relative_error(fitted, measured)}
    return {"points": len(points)} | {
        key: round(value, 4) if value is not None else None for key, value in figures.items()
    }


def pick(group: Sequence[Line]) -> Line | None:
    """The side that the predictor picks in one setting and workload, against the fastest measured one.

    Of the sides that compute all rows of this workload: GShard drops some.
    """
    names = [name for name in SIDES if name != AGAIN and not SIDES[name].is_even]
    names = [name for name in names if SIDES[name].execution in ("exchange", "zero 2", "zero 3")]
    names = [name for name in names if all(name in each["sides"] for each in group)]
    if len(names) < 2:
        return None
    estimates = {n: median(each["sides"][n]["predicted"] for each in group) for n in names}
    measured = {n: median(each["sides"][n]["seconds"] for each in group) for n in names}
    picked, best = min(names, key=estimates.__getitem__), min(names, key=measured.__getitem__)
    over_best = median(_ratios(group, picked, best))
    within = over_best <= 1 + max(MIN_FLOOR, floor_of(group))
    return {"pick": picked, "best": best, "over_best": round(over_best, 4), "within": within}


def spread(values: Sequence[float]) -> list[float]:
    """Median, least, most; empty without values."""
    return [round(value, 3) for value in (median(values), min(values), max(values))] if values else []


def _ratios(group: Sequence[Line], above: str, below: str) -> list[float]:
    """Seconds of one side over those of another, in the rounds that have both."""
    both = [each["sides"] for each in group if {above, below} <= {*each["sides"]}]
    return [sides[above]["seconds"] / sides[below]["seconds"] for sides in both]


def _by_case(rounds: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    cases: dict[tuple[str, str], list[Line]] = {}
    for each in rounds:
        cases.setdefault((each["setting"], each["workload"]), []).append(each)
    return cases


def _r2(predicted: np.ndarray, measured: np.ndarray) -> float | None:
    """None if all measured values are equal."""
    total = float(((measured - measured.mean()) ** 2).sum())
    return 1 - float(((measured - predicted) ** 2).sum()) / total if total else None


def _relative_error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.abs(predicted / measured - 1).mean())
