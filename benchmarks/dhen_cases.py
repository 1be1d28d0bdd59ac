"""What benchmarks/dhen_quality.py compares: models, each with as many operations as the one that it is held against.

A case whose `like` names another is widened or narrowed, by the knob it names, until its forward pass has as many
operations as that one's, within 2 %; `describe` counts them. No size is written down that could be found so.
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
from shardwright.spec.optimizer import SparseOptimizer

DIM, BOTTOM, TOP, HIDDEN, EMBEDDINGS = 16, (64, 16), 64, 128, 12
LAYERS = 2
NEAR = 0.02
SIZES = (DIM, BOTTOM, TOP, HIDDEN, EMBEDDINGS, NEAR)
DHEN = "dlrm + dcn_v2 2"  # what is claimed of it was asked of other pairs too
MOST = 4096  # of any size that is searched for
DEPTHS = (1, 2, 4, 6)
SHORT, LONG = 1 << 21, 1 << 23


@dataclass(frozen=True, slots=True)
class Case:
    """A model: modules of each of its layers, or none for a DLRM; `like` has the operations it must have."""

    modules: tuple[str, ...] = ()
    layers: int = LAYERS
    ensemble: str = "sum"
    like: str = ""
    knob: str = "top"  # what is searched: embeddings, hidden or top; then the head's width settles the rest
    few: str = ""  # the case whose number of embeddings it has
    experts: tuple[int, int] = (0, 0)  # and how many are chosen
    most: int = SHORT  # samples of the stream


def model(case: Case, sizes: Mapping[str, int], source: Any, optimizer: SparseOptimizer) -> nn.Module:
    """On the meta device."""
    form: dict[str, Any] = {"dim": DIM, "bottom": [*BOTTOM]}
    with torch.device("meta"):
        if case.modules:
            modules = [_module(name, sizes) for name in case.modules]
            stack = {"layers": case.layers, "embeddings": sizes["embeddings"], "ensemble": case.ensemble, "raw": True}
            return ctr.dhen(source, optimizer, **form, top=[sizes["head"]], modules=modules, stack=stack)
        top = [sizes["top"], sizes["head"]]
        if case.experts[0]:
            shape = dict(zip(("num_experts", "num_chosen"), case.experts, strict=True))
            return ctr.dlrm_moe(source, optimizer, **form, top=top, **shape)
        return ctr.dlrm(source, optimizer, **form, top=top)


def _module(name: str, sizes: Mapping[str, int]) -> Any:
    options = MappingProxyType(
        {"dlrm": {"hidden": [sizes["hidden"]]}, "fm": {"hidden": [sizes["hidden"]]}, "attention": {"widen": 2}}
    )
    return {"kind": name, **options.get(name, {})}


def flops(made: nn.Module, batch: Batch) -> int:
    """Of the forward pass of a sample."""
    return sum(block.forward_flops for block in describe(made, batch).blocks) // batch.batch_size


def sizes(case: Case, source: Any, optimizer: SparseOptimizer, batch: Batch) -> dict[str, int]:
    """The sizes that give a case its operations."""
    start = {"embeddings": EMBEDDINGS, "hidden": HIDDEN, "top": 2 * TOP, "head": TOP}
    if case.few:
        start["embeddings"] = sizes(CASES[case.few], source, optimizer, batch)["embeddings"]
    if not case.like:
        return start
    twin = CASES[case.like]
    wanted = flops(model(twin, sizes(twin, source, optimizer, batch), source, optimizer), batch)

    def count(name: str, value: int) -> int:
        return flops(model(case, start | {name: value}, source, optimizer), batch)

    start[case.knob] = nearest(lambda value: count(case.knob, value), wanted, len(case.modules) or 1)
    if abs(count("head", TOP) / wanted - 1) > NEAR / 4:
        start["head"] = nearest(lambda value: count("head", value), wanted, 1)
    found = count("head", start["head"])
    if abs(found / wanted - 1) > NEAR:
        raise SystemExit(f"{case}: {found} operations a sample, {case.like} has {wanted}: no size brings it near")
    return start


def used(case: Case, found: Mapping[str, int]) -> dict[str, int]:
    """Of the sizes those that this case has."""
    hidden = {"dlrm", "fm"} & set(case.modules)
    names = ("embeddings", *(["hidden"] if hidden else []), "head") if case.modules else ("top", "head")
    return {name: found[name] for name in names}


def nearest(count: Callable[[int], int], wanted: int, least: int) -> int:
    """The value whose count comes nearest; counts rise with it."""
    low, high = least, MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= wanted else (low, middle)
    return min((low, high), key=lambda value: abs(count(value) - wanted))


def stack(depth: int = LAYERS) -> str:
    """The stack of AdvancedDLRM that others of its depth are held against."""
    return f"stack dlrm {depth}"


def beside(*modules: str, depth: int = LAYERS, ensemble: str = "sum", knob: str = "embeddings") -> Case:
    return Case(modules, depth, ensemble, like=stack(depth), knob=knob)


def _cases() -> dict[str, Case]:
    pair, other, experts = ("dlrm", "linear"), ("dlrm", "dcn_v2"), (8, 2)
    found = {
        stack(): Case(("dlrm",)),
        DHEN: beside(*other),
        "dlrm + linear 2": beside(*pair),
        "stack dlrm 2, as few embeddings": Case(("dlrm",), like=stack(), knob="hidden", few=DHEN),
        "stack dcn_v2 2": beside("dcn_v2"),
        "stack linear 2": beside("linear"),
        "stack dcn 2": beside("dcn"),
        "stack attention 2": beside("attention"),
        "stack convolution 2": beside("convolution"),
        "stack fm 2": beside("fm"),
        "dlrm, wide": Case(like=stack()),
        "dlrm, experts 2": Case(like=stack(), experts=experts),
        "dlrm, wide, its rates": Case(like=stack()),
        "dlrm, experts 2, its rates": Case(like=stack(), experts=experts),
        "dlrm": Case(),
        "dcn + linear 2": beside("dcn", "linear"),
        "attention + linear 2": beside("attention", "linear"),
        "attention + convolution 2": beside("attention", "convolution"),
    }
    for depth in (depth for depth in DEPTHS if depth != LAYERS):
        found |= {stack(depth): Case(("dlrm",), depth), f"dlrm + linear {depth}": beside(*pair, depth=depth)}
        found |= {f"dlrm + dcn_v2 {depth}": beside(*other, depth=depth)}
        found |= {f"dlrm, experts {depth}": Case(like=stack(depth), experts=experts)} if depth > 1 else {}
    ensembles = {"concat": "concat", "weighted sum": "weighted_sum", "softmax sum": "softmax_sum"}
    found |= {f"dlrm + linear 2, {name}": beside(*pair, ensemble=kind) for name, kind in ensembles.items()}
    found[f"{DHEN}, concat"] = beside(*other, ensemble="concat")
    found |= {f"{name} 2": beside(*name.split(" + ")) for name in ("dlrm + dcn_v2 + linear", "fm + linear")}
    return {name: replace(case, most=LONG) if name in CLAIMED else case for name, case in found.items()}


TUNED = ("dlrm, wide, its rates", "dlrm, experts 2, its rates")
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
RIVALS = (*STACKS, "dlrm, wide", "dlrm, experts 2", *TUNED)
CLAIMED = (DHEN, "dlrm + linear 2", *RIVALS)
MORE_SEEDS = (  # where three leave an interval that may reach zero
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
