"""Format pydantic's validation errors as one line: the dotted key in the file, and the remedy.

Works on pydantic's list of errors without importing pydantic; types come from the dataclasses.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from shardwright.errors import did_you_mean

MAX_SHOWN_CHARACTERS = 60


def format_parse_errors(cls: Any, errors: Sequence[Mapping[str, Any]]) -> str:
    """Format the most useful error: a wrong version explains all others, an unknown key explains a missing key."""
    first = min(errors, key=lambda e: (e["loc"] != ("version",), e["type"] != "unexpected_keyword_argument"))
    num_more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return _format_error(cls, first) + num_more


def _format_error(cls: Any, error: Mapping[str, Any]) -> str:
    key, type_ = _locate(cls, error["loc"])
    match error["type"]:
        case "json_invalid":
            return f"bad JSON: {error['ctx']['error']}"
        case "unexpected_keyword_argument":
            *parents, name = error["loc"]
            return f"{key}: unknown key{did_you_mean(str(name), _field_types(_locate(cls, parents)[1]))}"
        case "missing":
            return f"{key}: missing key"
        case "literal_error":
            value = str(error["input"])
            return f'{key}: "{value}" is not allowed{did_you_mean(value, map(str, get_args(type_)))}'
        case "union_tag_not_found":
            return f"{key}.kind: missing key{did_you_mean('', _classes_by_kind(type_))}".removeprefix(".")
        case "union_tag_invalid":
            tag = error["ctx"]["tag"]
            return f'{key}.kind: "{tag}" is not allowed{did_you_mean(tag, _classes_by_kind(type_))}'.removeprefix(".")
        case _:
            return f"{key}: {_generic_message(error)}".removeprefix(": ")


def _generic_message(error: Mapping[str, Any]) -> str:
    text = json.dumps(error["input"], default=str)
    text = text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 3] + "..."
    return f"{error['msg'].replace('Input should be', 'wanted')}, got {text}"


def _locate(type_: Any, loc: Sequence[int | str]) -> tuple[str, Any]:
    """The dotted key of an error, without the union tags that pydantic inserts, and the type of its value."""
    keys: list[str] = []
    type_ = _unwrap(type_)
    for part in loc:
        if _is_union(type_):
            type_ = _classes_by_kind(type_).get(str(part))
        else:
            keys.append(str(part))
            type_ = _unwrap(_child_type(type_, part))
    return ".".join(keys), type_


def _child_type(type_: Any, part: int | str) -> Any:
    """The type of a field, item or key of `type_`; None if unknown."""
    if args := get_args(type_):
        index = 0 if args[-1] is Ellipsis else part if isinstance(part, int) else len(args) - 1
        return args[min(index, len(args) - 1)]
    types = _field_types(type_)
    return types.get(part) if isinstance(part, str) else dict(enumerate(types.values())).get(part)


def _field_types(type_: Any) -> dict[str, Any]:
    return get_type_hints(type_, include_extras=True) if isinstance(type_, type) else {}


def _unwrap(type_: Any) -> Any:
    """The type without its annotations and without `| None`."""
    if get_origin(type_) is Annotated:
        return _unwrap(get_args(type_)[0])
    members = [member for member in get_args(type_) if member is not NoneType]
    return _unwrap(members[0]) if _is_union(type_) and len(members) == 1 else type_


def _is_union(type_: Any) -> bool:
    return get_origin(type_) in (Union, UnionType)


def _classes_by_kind(union: Any) -> dict[str, Any]:
    """The dataclasses of a union by their `kind`."""
    members = [member for member in get_args(union) if is_dataclass(member)]
    return {str(field.default): member for member in members for field in fields(member) if field.name == "kind"}
