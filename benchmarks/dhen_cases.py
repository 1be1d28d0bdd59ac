"""What benchmarks/dhen_quality.py compares: models, each with as many operations as the one that it is held against.

A case whose `like` names another is widened or narrowed, by the knob it names, until its forward pass has as many
operations as that one's, within 2 %; `describe` counts them. No size is written down that could be found so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from shardwright.jagged import Batch
from shardwright.measure.describe import describe
from shardwright.models import clicks
from shardwright.spec.optimizer import SparseOptimizer

DIM, BOTTOM, TOP, HIDDEN = 16, (64, 16), 64, 128
LAYERS = 2
NEAR = 0.02
SIZES = (DIM, BOTTOM, TOP, HIDDEN, NEAR)
MOST = 4096  # of any size that is searched for
DHEN = "dhen 2"
DEPTHS = (1, 2, 4, 6)


@dataclass(frozen=True, slots=True)
class Case:
    """A model: modules of each of its layers, or none for a DLRM; `like` has the operations it must have."""

    name: str
    modules: tuple[str, ...] = ()
    layers: int = LAYERS
    ensemble: str = "concat"
    like: str = ""
    knob: str = ""  # what is searched: embeddings, hidden or top; then the head's width settles the rest
    experts: tuple[int, int] = (0, 0)  # and how many are chosen


def model(case: Case, sizes: Mapping[str, int], source: Any, optimizer: SparseOptimizer) -> nn.Module:
    """On the meta device."""
    form: dict[str, Any] = {"dim": DIM, "bottom": [*BOTTOM]}
    with torch.device("meta"):
        if case.modules:
            modules = [_module(name, sizes) for name in case.modules]
            stack = {"layers": case.layers, "embeddings": sizes["embeddings"], "ensemble": case.ensemble}
            return clicks.dhen(source, optimizer, **form, top=[sizes["head"]], modules=modules, stack=stack)
        top = [sizes["top"], sizes["head"]]
        if case.experts[0]:
            shape = dict(zip(("num_experts", "num_chosen"), case.experts, strict=True))
            return clicks.dlrm_moe(source, optimizer, **form, top=top, **shape)
        return clicks.dlrm(source, optimizer, **form, top=top)


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
    start = {"embeddings": len(source.features) + 1, "hidden": HIDDEN, "top": 2 * TOP, "head": TOP}
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
        raise SystemExit(f"{case.name}: {found} operations a sample, {case.like} has {wanted}: no size brings it near")
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


def _cases() -> tuple[Case, ...]:
    def beside(name: str, *modules: str, knob: str = "embeddings", ensemble: str = "concat") -> Case:
        return Case(name, modules, ensemble=ensemble, like=DHEN, knob=knob)

    pair = ("dlrm", "linear")
    return (
        Case(DHEN, pair),
        beside("stack dlrm", "dlrm"),
        beside("stack dlrm, as many embeddings", "dlrm", knob="hidden"),
        beside("stack linear", "linear"),
        beside("stack attention", "attention"),
        beside("stack convolution", "convolution"),
        beside("stack dcn", "dcn"),
        Case("dlrm wide", like=DHEN, knob="top"),
        Case("dlrm moe 2", like=DHEN, knob="top", experts=(8, 2)),
        Case("dlrm"),
        beside("dcn + linear", "dcn", "linear"),
        beside("attention + linear", "attention", "linear"),
        beside("attention + convolution", "attention", "convolution"),
        beside("sum", *pair, ensemble="sum"),
        beside("weighted sum", *pair, ensemble="weighted_sum"),
        beside("softmax sum", *pair, ensemble="softmax_sum"),
        *(Case(f"dhen {depth}", pair, depth) for depth in DEPTHS if depth != LAYERS),
        *(
            Case(f"stack dlrm {depth}", ("dlrm",), depth, like=f"dhen {depth}", knob="embeddings")
            for depth in DEPTHS
            if depth != LAYERS
        ),
        *(
            Case(f"dlrm moe {depth}", like=f"dhen {depth}", knob="top", experts=(8, 2))
            for depth in DEPTHS
            if depth not in (1, LAYERS)
        ),
        beside("fm + linear", "fm", "linear"),
        beside("dlrm + attention + linear", "dlrm", "attention", "linear"),
    )


CASES: MappingProxyType[str, Case] = MappingProxyType({case.name: case for case in _cases()})
STACKS = tuple(name for name in CASES if name.startswith("stack") and CASES[name].layers == LAYERS)
RIVALS = (*STACKS, "dlrm wide", "dlrm moe 2")
