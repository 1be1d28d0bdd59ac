"""Keys of a recipe's [model] by kind: names, types and defaults from signatures, what they do from keys.toml."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, get_args, get_origin

from shardwright.models.names import MODELS

FILLED = ("source", "optimizer", "inputs")  # parameters that a run passes
TYPES = MappingProxyType({"int": "integer", "float": "number", "bool": "true or false", "str": "text"})


@dataclass(frozen=True, slots=True)
class ModelKey:
    """A key of [model]; `default` is a text as in a recipe, or required or none."""

    name: str
    type: str
    default: str
    about: str


def model_keys(kind: str) -> tuple[ModelKey, ...]:
    """The keys of a built-in kind of model, except `kind` itself."""
    texts = tomllib.loads((Path(__file__).parent / "keys.toml").read_text())
    texts |= texts.get(kind, {})
    return tuple(
        ModelKey(name, type_text(parameter.annotation), default_text(parameter.default, parameter.empty), texts[name])
        for name, parameter in signature(MODELS[kind]).parameters.items()
        if name not in FILLED
    )


def format_keys(kind: str) -> Iterator[str]:
    """Lines of a table of the keys of a kind of model."""
    rows = [("key", "type", "default", "what")]
    rows += [(f"model.{key.name}", key.type, key.default, key.about) for key in model_keys(kind)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        yield "  ".join((*cells, row[-1]))


def key_rows(kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows (key, kinds, type, default, what) of a table in docs; equal keys of several kinds share a row."""
    kinds_by_key: dict[ModelKey, list[str]] = {}
    for kind in kinds:
        for key in model_keys(kind):
            kinds_by_key.setdefault(key, []).append(kind)
    return [
        (f"`{key.name}`", "all" if len(users) == len(kinds) else ", ".join(users), key.type, key.default, key.about)
        for key, users in kinds_by_key.items()
    ]


def markdown_table(kinds: Sequence[str], root: str) -> str:
    """The table of the keys of these kinds for a page of docs; `root`: the path from the page to docs, as "../"."""
    rows = [("key", "kinds", "type", "default", "what"), *key_rows(kinds)]
    if len(kinds) == 1:
        rows = [(row[0], *row[2:]) for row in rows]
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|\n")
    return re.sub(r"docs/([\w/-]+\.md)", rf"[\1]({root}\1)", "".join(lines))


def type_text(hint: Any) -> str:
    """A parameter's type in words."""
    if type(None) in get_args(hint):
        hint = next((inner for inner in get_args(hint) if inner is not type(None)), hint)
    if get_origin(hint) is list:
        return f"list of {TYPES[get_args(hint)[0].__name__]}s"
    if hint is list:
        return "list"
    if get_origin(hint) is UnionType:
        return " or ".join(type_text(inner) for inner in get_args(hint))
    return "section" if get_origin(hint) is Mapping else TYPES[hint.__name__]


def default_text(value: Any, empty: Any) -> str:
    """A parameter's default as in a recipe; `empty` is the value of a parameter without one."""
    if value is empty:
        return "required"
    if isinstance(value, Mapping) or value is None or value == "":
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value}"
