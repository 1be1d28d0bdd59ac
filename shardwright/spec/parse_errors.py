"""What pydantic found wrong in a file, told in one line: the dotted key as the file has it, and the remedy.

Works on pydantic's list of errors, without importing it; the types it walks are those of the dataclasses.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from shardwright.errors import did_you_mean

MAX_SHOWN_CHARACTERS = 60


def format_parse_errors(cls: Any, errors: Sequence[Mapping[str, Any]]) -> str:
    """The most telling error: a wrong version explains all others, an unknown key a missing one."""
    first = min(errors, key=lambda e: (e["loc"] != ("version",), e["type"] != "unexpected_keyword_argument"))
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return _line(cls, first) + more


def _line(cls: Any, error: Mapping[str, Any]) -> str:
    key, hint = _locate(cls, error["loc"])
    match error["type"]:
        case "json_invalid":
            return f"bad JSON: {error['ctx']['error']}"
        case "unexpected_keyword_argument":
            *above, name = error["loc"]
            return f"{key}: unknown key{did_you_mean(str(name), _hints(_locate(cls, above)[1]))}"
        case "missing":
            return f"{key}: missing key"
        case "literal_error":
            value = str(error["input"])
            return f'{key}: "{value}" is not allowed{did_you_mean(value, map(str, get_args(hint)))}'
        case "union_tag_not_found":
            return f"{key}.kind: missing key{did_you_mean('', _kinds(hint))}".removeprefix(".")
        case "union_tag_invalid":
            tag = error["ctx"]["tag"]
            return f'{key}.kind: "{tag}" is not allowed{did_you_mean(tag, _kinds(hint))}'.removeprefix(".")
        case _:
            return f"{key}: {_otherwise(error)}".removeprefix(": ")


def _otherwise(error: Mapping[str, Any]) -> str:
    got = json.dumps(error["input"], default=str)
    got = got if len(got) <= MAX_SHOWN_CHARACTERS else got[: MAX_SHOWN_CHARACTERS - 3] + "..."
    return f"{error['msg'].replace('Input should be', 'wanted')}, got {got}"


def _locate(hint: Any, loc: Sequence[int | str]) -> tuple[str, Any]:
    """The dotted key of an error, without the union tags that pydantic puts in, and the type found there."""
    keys: list[str] = []
    hint = _bare(hint)
    for part in loc:
        if _is_union(hint):
            hint = _kinds(hint).get(str(part))
        else:
            keys.append(str(part))
            hint = _bare(_inside(hint, part))
    return ".".join(keys), hint


def _inside(hint: Any, part: int | str) -> Any:
    """The type of a field, item or key of a type; None where that is unknown."""
    if args := get_args(hint):
        index = 0 if args[-1] is Ellipsis else part if isinstance(part, int) else len(args) - 1
        return args[min(index, len(args) - 1)]
    hints = _hints(hint)
    return hints.get(part) if isinstance(part, str) else dict(enumerate(hints.values())).get(part)


def _hints(hint: Any) -> dict[str, Any]:
    return get_type_hints(hint, include_extras=True) if isinstance(hint, type) else {}


def _bare(hint: Any) -> Any:
    """The type without its annotations and without `| None`."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    members = [member for member in get_args(hint) if member is not NoneType]
    return _bare(members[0]) if _is_union(hint) and len(members) == 1 else hint


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _kinds(union: Any) -> dict[str, Any]:
    """The dataclasses of a union by their `kind`."""
    members = [member for member in get_args(union) if is_dataclass(member)]
    return {str(field.default): member for member in members for field in fields(member) if field.name == "kind"}
