"""Which layers are where, as Megatron-LM writes it: the chunks of a pipeline, and the layers with experts.

A layout names the layers of each chunk in the order of the model: "Et*5|(t*6|)*14t*5L" has 5 layers in the first and
last chunk and 6 in those between; E is the embedding, t a layer, m a layer of multi-token prediction, L the loss.
Layers with experts are a list of 0 and 1 in Python's notation: "([0]*3+[1]*58)".
"""

import ast
import re
from collections.abc import Sequence
from itertools import groupby

from shardwright.errors import UserError
from shardwright.spec.transformer import ExpertLayers

LAYOUT, EXPERT_PATTERN = "--pipeline-model-parallel-layout", "--moe-layer-freq"
REPEATED = (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})")  # of stages, then of one layer


def layout_text(cuts: Sequence[int]) -> str:
    """The layout of chunks with so many layers."""
    stages = [f"t*{num}" if num > 1 else "t" * num for num in cuts]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "L"
    parts = [*(f"{stage}|" for stage in stages[:-1]), stages[-1]]
    repeats = [(part, len([*same])) for part, same in groupby(parts)]
    return "".join(f"({part})*{num}" if num > 1 else part for part, num in repeats)


def parse_layout(text: str) -> tuple[int, ...]:
    """Layers of each chunk."""
    layout = text.replace(",", "")
    for pattern in REPEATED:
        layout = re.sub(pattern, lambda match: match[1] * int(match[2]), layout)
    if unknown := sorted(set(layout) - set("EtmL|")):
        raise UserError(f"{LAYOUT} is {text!r}; wanted E, t, m, L and |, got {' '.join(unknown)}")
    return tuple(stage.count("t") for stage in layout.split("|"))


def pattern_text(layers: int, experts: ExpertLayers) -> str:
    return f"([0]*{experts.dense_layers}+[1]*{layers - experts.dense_layers})"


def parse_dense_layers(text: str, layers: int) -> int:
    """How many layers come before the first with experts; all that follow must have experts."""
    wrong = f"{EXPERT_PATTERN} is {text!r}; wanted 1, or a list of {layers} layers: first 0 without experts, then 1"
    if text == "1":
        return 0
    try:
        pattern = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        raise UserError(wrong) from None
    num = sum(each == 0 for each in pattern)
    if pattern != [0] * num + [1] * (layers - num):
        raise UserError(wrong)
    return num


def _evaluate(node: ast.expr) -> list[int]:
    """A list of whole numbers from lists, sums of lists and multiples of lists."""
    match node:
        case ast.List(elts=elements):
            return [_read_number(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left) + _evaluate(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _evaluate(left) * _read_number(right)
        case _:
            raise ValueError


def _read_number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if value < 10_000:
            return value
        case _:
            raise ValueError
