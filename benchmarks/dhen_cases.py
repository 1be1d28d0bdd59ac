"""The models that benchmarks/dhen_quality.py compares, each with as many operations as its rival.

If `like` of a case names another case, the size named by `knob` is changed until the forward pass has as many
operations as the other's, within 2 %, as counted by `describe`. So these sizes are computed, not written down.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from shardwright.jagged import Batch
from shardwright.measure.describe import describe
from shardwright.models import ctr
from shardwright.models.click_inputs import ClickInputs
from shardwright.spec.optimizer import SparseOptimizer

DIM, BOTTOM, TOP, HIDDEN, EMBEDDINGS = 16, (64, 16), 64, 128, 12
LAYERS = 2
FLOPS_TOLERANCE = 0.02
SIZES = (DIM, BOTTOM, TOP, HIDDEN, EMBEDDINGS, FLOPS_TOLERANCE)
DHEN = "dlrm + dcn_v2 2"  # other pairs were tried, too
MAX_SIZE = 4096  # upper bound of the search
BALANCE = (0.01, 0.001)  # coefficients of the balance loss and the z-loss, those of Switch and ST-MoE
DEPTHS = (1, 2, 4, 6)
SHORT, LONG = 1 << 21, 1 << 23


@dataclass(frozen=True, slots=True)
class Case:
    """A model: the modules of each layer, or none for a DLRM; `like`: the case with the same number of operations."""

    modules: tuple[str, ...] = ()
    layers: int = LAYERS
    ensemble: str = "sum"
    like: str = ""
    knob: str = "top"  # the size that is searched: embeddings, hidden or top; then the head's width for the rest
    few: str = ""  # the case with the same number of embeddings
    experts: tuple[float, ...] = (0, 0)  # experts, experts per sample; coefficients of the balance loss and the z-loss
    most: int = SHORT  # samples of the stream to train on


def model(case: Case, sizes: Mapping[str, int], source: Any, optimizer: SparseOptimizer) -> nn.Module:
    """Build a case's model on the meta device."""
    options: dict[str, Any] = {"dim": DIM, "bottom": [*BOTTOM]}
    inputs = ClickInputs(source, optimizer)
    with torch.device("meta"):
        if case.modules:
            modules = [_module(name, sizes) for name in case.modules]
            stack = {"layers": case.layers, "embeddings": sizes["embeddings"], "ensemble": case.ensemble, "raw": True}
            return ctr.dhen(inputs, **options, top=[sizes["head"]], modules=modules, stack=stack)
        top = [sizes["top"], sizes["head"]]
        if case.experts[0]:
            options["experts"] = dict(zip(("num_experts", "num_chosen", "balance", "z"), case.experts, strict=False))
        return ctr.dlrm(inputs, **options, top=top)


def _module(name: str, sizes: Mapping[str, int]) -> Any:
    options = MappingProxyType(
        {"dlrm": {"hidden": [sizes["hidden"]]}, "fm": {"hidden": [sizes["hidden"]]}, "attention": {"widen": 2}}
    )
    return {"kind": name, **options.get(name, {})}


def flops(model_: nn.Module, batch: Batch) -> int:
    """FLOPs of the forward pass per sample."""
    return sum(block.forward_flops for block in describe(model_, batch).blocks) // batch.batch_size


def sizes(case: Case, source: Any, optimizer: SparseOptimizer, batch: Batch) -> dict[str, int]:
    """The sizes with which a case has as many operations as its rival."""
    chosen = {"embeddings": EMBEDDINGS, "hidden": HIDDEN, "top": 2 * TOP, "head": TOP}
    if case.few:
        chosen["embeddings"] = sizes(CASES[case.few], source, optimizer, batch)["embeddings"]
    if not case.like:
        return chosen
    rival = CASES[case.like]
    target = flops(model(rival, sizes(rival, source, optimizer, batch), source, optimizer), batch)

    def count(name: str, value: int) -> int:
        return flops(model(case, chosen | {name: value}, source, optimizer), batch)

    chosen[case.knob] = nearest(lambda value: count(case.knob, value), target, len(case.modules) or 1)
    if abs(count("head", TOP) / target - 1) > FLOPS_TOLERANCE / 4:
        chosen["head"] = nearest(lambda value: count("head", value), target, 1)
    found_flops = count("head", chosen["head"])
    if abs(found_flops / target - 1) > FLOPS_TOLERANCE:
        raise SystemExit(f"{case}: {found_flops} operations a sample, {case.like} has {target}: no size brings it near")
    return chosen


def case_sizes(case: Case, sizes_by_name: Mapping[str, int]) -> dict[str, int]:
    """The sizes that this case uses."""
    hidden = {"dlrm", "fm"} & set(case.modules)
    names = ("embeddings", *(["hidden"] if hidden else []), "head") if case.modules else ("top", "head")
    return {name: sizes_by_name[name] for name in names}


def nearest(count: Callable[[int], int], target: int, least: int) -> int:
    """The value whose count is nearest to `target`; `count` must be increasing."""
    low, high = least, MAX_SIZE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= target else (low, middle)
    return min((low, high), key=lambda value: abs(count(value) - target))


def stack(depth: int = LAYERS) -> str:
    """The stack of AdvancedDLRM that other cases of this depth are compared with."""
    return f"stack dlrm {depth}"


def match_stack(*modules: str, depth: int = LAYERS, ensemble: str = "sum", knob: str = "embeddings") -> Case:
    """A case with as many operations as the stack of its depth."""
    return Case(modules, depth, ensemble, like=stack(depth), knob=knob)


def _cases() -> dict[str, Case]:
    paper_pair, chosen_pair, experts = ("dlrm", "linear"), ("dlrm", "dcn_v2"), (8, 2)
    balanced = Case(like=stack(), experts=(*experts, *BALANCE))
    cases = {
        stack(): Case(("dlrm",)),
        DHEN: match_stack(*chosen_pair),
        "dlrm + linear 2": match_stack(*paper_pair),
        "stack dlrm 2, as few embeddings": Case(("dlrm",), like=stack(), knob="hidden", few=DHEN),
        "stack dcn_v2 2": match_stack("dcn_v2"),
        "stack linear 2": match_stack("linear"),
        "stack dcn 2": match_stack("dcn"),
        "stack attention 2": match_stack("attention"),
        "stack convolution 2": match_stack("convolution"),
        "stack fm 2": match_stack("fm"),
        "dlrm, wide": Case(like=stack()),
        "dlrm, experts 2": Case(like=stack(), experts=experts),
        "dlrm, balanced experts 2": balanced,
        "dlrm, wide, its rates": Case(like=stack()),
        "dlrm, experts 2, its rates": Case(like=stack(), experts=experts),
        "dlrm, balanced experts 2, its rates": balanced,
        "dlrm": Case(),
        "dcn + linear 2": match_stack("dcn", "linear"),
        "attention + linear 2": match_stack("attention", "linear"),
        "attention + convolution 2": match_stack("attention", "convolution"),
    }
    for depth in (depth for depth in DEPTHS if depth != LAYERS):
        cases |= {stack(depth): Case(("dlrm",), depth), f"dlrm + linear {depth}": match_stack(*paper_pair, depth=depth)}
        cases |= {f"dlrm + dcn_v2 {depth}": match_stack(*chosen_pair, depth=depth)}
        cases |= {f"dlrm, experts {depth}": Case(like=stack(depth), experts=experts)} if depth > 1 else {}
    ensembles = {"concat": "concat", "weighted sum": "weighted_sum", "softmax sum": "softmax_sum"}
    cases |= {f"dlrm + linear 2, {name}": match_stack(*paper_pair, ensemble=kind) for name, kind in ensembles.items()}
    cases[f"{DHEN}, concat"] = match_stack(*chosen_pair, ensemble="concat")
    cases |= {f"{name} 2": match_stack(*name.split(" + ")) for name in ("dlrm + dcn_v2 + linear", "fm + linear")}
    return {name: replace(case, most=LONG) if name in CLAIMED else case for name, case in cases.items()}


TUNED = ("dlrm, wide, its rates", "dlrm, experts 2, its rates", "dlrm, balanced experts 2, its rates")
STACKS = (
    "stack dlrm 2",
    "stack dlrm 2, as few embeddings",
    "stack dcn_v2 2",
    "stack linear 2",
    "stack dcn 2",
    "stack attention 2",
    "stack convolution 2",
    "stack fm 2",
)
RIVALS = (*STACKS, "dlrm, wide", "dlrm, experts 2", "dlrm, balanced experts 2", *TUNED)
CLAIMED = (DHEN, "dlrm + linear 2", *RIVALS)
MORE_SEEDS = (  # cases whose interval may include zero with three seeds
    DHEN,
    "stack dlrm 2",
    "stack dlrm 2, as few embeddings",
    "stack dcn_v2 2",
    "stack linear 2",
    "stack fm 2",
    "dlrm, experts 2",
    "dlrm, experts 2, its rates",
)
CASES: MappingProxyType[str, Case] = MappingProxyType(_cases())
