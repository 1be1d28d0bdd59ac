"""The published figures of FasterMoE (PPoPP'22) with our planner on the clusters johnny and trevor: all simulated.

    python -m benchmarks.fastermoe [--trace FILE] [--iterations N] [--write NAME]

Nothing runs but the planner: seconds of computation and of links are those of the presets, as the simulator has them
(benchmarks/fastermoe_schedule.py). FILE is expert_counts_u16.npy.zst of the run that SmartMoE recorded; without it a
Zipf law generates routing. Each line has "simulated" and "routing". Lines, by "what":

"model": table 2's models, milliseconds of all MoE layers of an iteration, forward and backward, and gains over "plain"
  (FastMoE). ZeRO-2, ZeRO-3: data parallel. "shadows": Algorithm 1, "steps": the schedule with groups of 4 ranks.
  "ours": exact copies or shadows, chosen by links, in our schedule; "ours, in a job": chosen by the costs in a plan, as
  a running job does. "even routing": the force-balanced ideal in our schedule; "ideal_share": its time / ours.
"shadowed": shadows by iteration and layer (figure 11). "layers": the schedule by layer (figure 12).
"predictor": computation, messages and copies of the complete model, without overlap, against the seconds of all links.
"bandwidth": decisions with wrong bandwidths, at the true ones: time over that of right decisions (A.4.3).
"geometry": other numbers of ranks, channels and hidden widths (A.5). "rack": ours on fast networks, as UltraEP.
"claim": the paper's figure, the simulated one of its methods, and ours. If the first two differ by more than 20 %,
  "alternatives" has the figure under other assumptions, for a sixth of the iterations, and "reason" the closest.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks import results_file
from benchmarks.fastermoe_claims import (
    AS_ASSUMED,
    CLUSTERS,
    PAPER,
    ULTRAEP,
    ULTRAEP_CLAIM,
    claim_line,
    figures,
    zero_note,
)
from benchmarks.fastermoe_models import (
    MODELS,
    Figure4Routings,
    Model,
    Routings,
    johnny_with_hosts,
    rack,
    with_one_level,
    with_rates,
)
from benchmarks.fastermoe_runs import (
    RANKS_PER_GROUP,
    Choose,
    Run,
    best_prefix,
    best_prefix_by_links,
    choose_by_links,
    choose_groups,
    ideal_seconds,
    layer_gains,
    paper_shadows,
    simulate_model,
)
from benchmarks.fastermoe_schedule import ZERO_2, ZERO_3, Schedule, Setting, Traffic
from shardwright.planner.experts import without_copies
from shardwright.spec.presets import load_cluster

Line = dict[str, Any]
ASSUMED = (
    "clusters: the presets johnny and trevor, with the rates that the paper's artifact uses; float32; every pass of "
    "products at 11.5 TFLOP/s, whatever its number of rows; links at their rates, shared by the ranks of a host",
    "top-2, alpha 2, one expert on each rank; tokens of a GPU: 1,024 (GPT), 2,048 (BERT), as the artifact has them",
    "only MoE layers; routing of the recorded layers stands for all of a model's",
    "16 experts: neighbouring recorded experts are added up; 64 experts: those of two layers, on 16 x 4 micro-batches",
    "each link carries its messages one after the other, and does not wait for other links",
    "Algorithm 1 has the rate of a network card, as the paper's code; ZeRO is not overlapped with computation",
    "rack: links of 450 GB/s (H200, NVLink) between all ranks; an expert layer of Qwen3-235B, 8,192 tokens a rank",
)
WRONG_RATES = (0.25, 0.5, 2.0, 4.0)
MORE_TOKENS = "four times as many tokens"
VARIANTS: dict[str, Callable[[Setting], Setting]] = {
    "each rank with the whole rate of its host's card": with_one_level,
    MORE_TOKENS: lambda setting: replace(setting, rows=4 * setting.rows),
}
FIGURE_4 = "routing of figure 4b"
MILD = 0.5  # exponent of a Zipf law


def model_line(run: Run) -> Line:
    ideal = ideal_seconds(run.setting, run.groups) * run.model.num_layers
    sides = ("plain", "shadows", "steps", "shadows, steps", "ours, in a job", "ours")
    seconds = {side: run.seconds(side) for side in sides} | {"even routing": ideal}
    seconds |= {"ZeRO-2": run.data_parallel_seconds(ZERO_2), "ZeRO-3": run.data_parallel_seconds(ZERO_3)}
    model = run.model
    return {
        "what": "model",
        "model": model.name,
        "cluster": model.cluster_name,
        "layers": model.num_layers,
        "experts": model.num_experts,
        "channels": model.channels,
        "tokens": model.tokens,
        "milliseconds": {side: round(1e3 * value, 1) for side, value in seconds.items()},
        "gain": {side: round(seconds["plain"] / value, 2) for side, value in seconds.items()},
        "over_zero_3": {side: round(seconds["ZeRO-3"] / seconds[side], 2) for side in ("shadows, steps", "ours")},
        "ideal_share": round(ideal / seconds["ours"], 3),
        "our_groups": run.groups,
    }


def shadowed_line(run: Run) -> Line:
    """Figure 11: shadows of each iteration and layer, and the gain by their number."""
    shadowed, gains = run.values["shadowed"], run.values["plain"] / run.values["shadows"]
    counts = Counter(shadowed.astype(int).ravel().tolist())
    shares = 100 * shadowed.mean(1) / run.setting.num_experts  # of an iteration
    return {
        "what": "shadowed",
        "model": run.model.name,
        "percent_of_experts": round(float(shares.mean()), 1),
        "percent_by_iteration": [round(float(share), 1) for share in shares],
        "layers_by_shadows": dict(sorted(counts.items())),
        "gain_by_shadows": {num: round(float(gains[shadowed == num].mean()), 2) for num in sorted(counts)},
        "most_gain_by_shadows": {num: round(float(gains[shadowed == num].max()), 2) for num in sorted(counts)},
        "percent_slower_than_plain": round(100 * float((gains < 1).mean()), 1),
    }


def layers_line(run: Run) -> Line:
    """Figure 12: the most that the schedule could gain in each layer, and what it does."""
    bounds, achieved = layer_gains(run.values)
    shares = [gain / bound for gain, bound in zip(achieved, bounds, strict=True)]
    return {
        "what": "layers",
        "model": run.model.name,
        "bound": [round(bound, 2) for bound in bounds],
        "gain": [round(gain, 2) for gain in achieved],
        "percent_of_bound": [round(100 * each, 1) for each in (median(shares), min(shares), max(shares))],
    }


def predictor_lines(cluster: str, routings: Routings) -> Iterator[Line]:
    """The complete model against Equation 2 on all links, without overlap."""
    settings = [model.setting for model in MODELS if model.cluster_name == cluster]
    for name in ("rate of the card", "the planner's costs"):
        pairs = list[tuple[float, float]]()
        for setting in settings:
            layer = setting.paper_layer if name == "rate of the card" else setting.planned_layer
            for _, _, chosen_RE in routings.samples(setting):
                shadows = replace(paper_shadows(setting, chosen_RE), layer=layer)
                for assignment in (without_copies(layer, chosen_RE), shadows):
                    parts = assignment.compute_seconds, assignment.exchange_seconds, assignment.copy_seconds
                    pairs.append((sum(parts), Traffic(setting, assignment).sequential_seconds))
        predicted, simulated = np.array(pairs).T
        spread = float(((simulated - simulated.mean()) ** 2).sum())
        yield {
            "what": "predictor",
            "cluster": cluster,
            "price": name,
            "r2": round(1 - float(((predicted - simulated) ** 2).sum()) / spread, 3),
            "correlation": round(float(np.corrcoef(predicted, simulated)[0, 1]), 3),
            "percent_error": round(100 * float(np.abs(predicted / simulated - 1).mean()), 1),
        }


def bandwidth_lines(model: Model, routings: Routings) -> Iterator[Line]:
    """Copies chosen with wrong rates of all links, in the schedules and at the rates of the cluster."""
    setting = model.setting
    samples = [chosen_RE for _, _, chosen_RE in routings.samples(setting)]
    groups = choose_groups(setting, samples[:6])

    def total(factor: float) -> tuple[float, float]:
        wrong, paper, ours = with_rates(setting, factor), 0.0, 0.0
        for chosen_RE in samples:
            shadows, chosen = paper_shadows(wrong, chosen_RE), choose_by_links(wrong, chosen_RE)
            paper += Schedule(Traffic(setting, shadows), setting.num_ranks // RANKS_PER_GROUP).paper_seconds
            ours += Schedule(Traffic(setting, chosen), groups).our_seconds
        return paper, ours

    right = total(1.0)
    for factor in WRONG_RATES:
        paper, ours = total(factor)
        slower = {"shadows, steps": round(paper / right[0], 3), "ours": round(ours / right[1], 3)}
        yield {"what": "bandwidth", "model": model.name, "factor": factor, "slower": slower}


def geometry_lines(routings: Routings) -> Iterator[Line]:
    """Hosts of johnny x channels at alpha 2, and other widths of the experts on two hosts."""
    cases = [(hosts, channels, 2) for hosts in (2, 4, 8) for channels in (1024, 2048, 4096)]
    for hosts, channels, alpha in (*cases, (2, 2048, 1), (2, 2048, 4), (2, 2048, 8)):
        cluster = johnny_with_hosts(hosts)
        setting = Setting(cluster, cluster.num_ranks, channels, alpha * channels, 2048)
        run = simulate_model(replace(MODELS[0], num_layers=1), setting, routings)
        yield {
            "what": "geometry",
            "ranks": cluster.num_ranks,
            "channels": channels,
            "alpha": alpha,
            "compute_over_messages": round(setting.rows * setting.compute_row / even_exchange_seconds(setting), 2),
            "gain": {side: round(run.gain(side), 2) for side in ("shadows", "steps", "shadows, steps", "ours")},
            "percent_shadowed": round(100 * run.shadowed_share, 1),
            "ideal_share": round(ideal_seconds(setting, run.groups) / run.seconds("ours"), 3),
        }


def even_exchange_seconds(setting: Setting) -> float:
    return setting.link_seconds(np.full((setting.num_ranks,) * 2, setting.rows * setting.row_bytes / setting.num_ranks))


def rack_lines(routings: Routings) -> Iterator[Line]:
    """One layer of Qwen3-235B (128 experts, top-8) in bf16 on 64 ranks, as UltraEP; also with milder routing."""
    for cluster in (rack(), load_cluster("h200-64")):
        setting = Setting(cluster, 128, 4096, 1536, 8 * 8192, "bfloat16", products=3)
        for each in (routings, replace(routings, trace="", exponent=MILD)):
            run = simulate_model(replace(MODELS[0], num_layers=1), setting, each)
            ideal, imbalance = ideal_seconds(setting, run.groups), run.values["compute"].mean()
            ideal_in_one_step = ideal_seconds(setting, 1)
            seconds = {side: run.seconds(side) for side in ("plain", "shadows, steps", "ours, in a job", "ours")}
            yield {
                "routing": each.text,
                "what": "rack",
                "cluster": cluster.name,
                "workload": "given" if each is routings else "mild",
                "rank_imbalance": round(float(imbalance) / (setting.rows * setting.compute_row), 2),
                "milliseconds": {side: round(1e3 * value, 2) for side, value in seconds.items()},
                "percent_of_ideal": {side: round(100 * ideal / value, 1) for side, value in seconds.items()},
                "percent_of_ideal_in_one_step": round(100 * ideal_in_one_step / seconds["ours"], 1),
                "our_groups": run.groups,
            }


def claim_lines(runs: Sequence[Run], routings: Routings, racks: Sequence[Line]) -> Iterator[Line]:
    fewer = replace(routings, num_iterations=max(1, routings.num_iterations // 6))

    def variant(name: str, *, lockstep: bool = False, choose_shadows: Choose = paper_shadows) -> dict[str, float]:
        settings = [VARIANTS[name](run.setting) if name in VARIANTS else run.setting for run in runs]
        each = figure_4(fewer) if name == FIGURE_4 else fewer
        options = {"ours": False, "lockstep": lockstep, "choose_shadows": choose_shadows}
        pairs = zip(runs, settings, strict=True)
        return figures([simulate_model(run.model, setting, each, **options) for run, setting in pairs])

    assumed = variant("")
    by_assumption = {name: variant(name) for name in (FIGURE_4, *VARIANTS)}
    by_assumption["each step waits for all ranks"] = variant("", lockstep=True)
    by_assumption["Algorithm 1 does not end early"] = variant("", choose_shadows=best_prefix)
    by_assumption[f"{MORE_TOKENS}, and Algorithm 1 does not end early"] = variant(
        MORE_TOKENS, choose_shadows=best_prefix
    )
    by_assumption["shadows chosen by links"] = variant("", choose_shadows=best_prefix_by_links)
    by_assumption["Equations 7 and 8 alone"] = figures(runs, equations=True)
    simulated, ours = figures(runs), figures(runs, "ours")
    for name, paper in PAPER.items():
        others = {AS_ASSUMED: assumed[name]}
        others |= {assumption: values[name] for assumption, values in by_assumption.items() if name in values}
        own = ours[name] if name.startswith("both") else None
        yield claim_line(name, paper, simulated[name], own, others, zero_note(name, paper, runs))
    shares = {f"{line['cluster']}, {line['workload']} routing": line["percent_of_ideal"]["ours"] for line in racks}
    shares |= {
        f"{line['cluster']}, {line['workload']} routing, ideal in one step": line["percent_of_ideal_in_one_step"]
        for line in racks
    }
    first, *_ = shares.values()
    yield claim_line(ULTRAEP_CLAIM, ULTRAEP, first, first, shares)


def figure_4(routings: Routings) -> Routings:
    return Figure4Routings(routings.trace, routings.num_iterations, routings.num_layers)


def result_lines(routings: Routings, models: Sequence[Model] = MODELS) -> Iterator[Line]:
    yield {"what": "assumed", "assumed": ASSUMED, "iterations": routings.num_iterations}
    runs = list[Run]()
    for model in models:
        runs.append(simulate_model(model, model.setting, routings))
        yield from (make_line(runs[-1]) for make_line in (model_line, shadowed_line, layers_line))
    fewer = replace(routings, num_iterations=max(1, routings.num_iterations // 6))
    if models != MODELS:
        yield from bandwidth_lines(models[0], fewer)
        return
    for cluster in CLUSTERS:
        yield from predictor_lines(cluster, fewer)
    for model in (MODELS[1], MODELS[5]):
        yield from bandwidth_lines(model, fewer)
    yield from geometry_lines(fewer)
    racks = [*rack_lines(fewer)]
    yield from racks
    yield from claim_lines(runs, routings, racks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="", metavar="FILE")
    parser.add_argument("--iterations", type=int, default=31)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    routings = Routings(args.trace, 1 if args.smoke else args.iterations)
    lines = list[Line]()
    for line in result_lines(routings, MODELS[:1] if args.smoke else MODELS):
        lines.append({"benchmark": "fastermoe", "simulated": True, "routing": routings.text, **line})
        print(json.dumps(lines[-1]), flush=True)
    if args.write:
        results_file.write(args.write, "fastermoe", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
