"""Nouns on disk: any dataclass to and from a JSON or TOML file, and the one-line errors of reading one.

The only place that knows pydantic; in memory a noun is a plain dataclass. Keys and types are judged here, and
nothing is converted, repaired or ignored. Whether a value makes sense is for the noun's own `verify`.
"""

import json
import os
import tomllib
from contextlib import suppress
from dataclasses import fields
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from shardwright.errors import UserError, check_regular_file
from shardwright.spec.parse_errors import format_parse_errors

T = TypeVar("T")
Plain = dict[str, "Plain"] | list["Plain"] | str | int | float | bool | None

BY_KIND = Field(discriminator="kind")  # marks a union of dataclasses told apart by their `kind`
LINE_WIDTH = 110


def read(cls: type[T], path: str | Path) -> T:
    """The value in a .json or .toml file; it is not verified."""
    path = Path(path)
    form = _form(path)
    check_regular_file(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return _parse(cls, content, form, str(path))


def from_plain(cls: type[T], data: object, origin: str) -> T:
    """The value in plain data (dicts, lists, numbers); `origin` is what errors call its source."""
    return _validated(cls, json.dumps(data, default=str), origin)


def write(value: object, path: str | Path) -> None:
    """Write the file, whole or not at all.

    What would not read back equal (a NaN, a list in place of a tuple) is refused before anything is written.
    """
    path = Path(path)
    form = _form(path)
    text = tomli_w.dumps(_without_none(to_plain(value))) if form == ".toml" else _pretty(to_plain(value)) + "\n"
    back = _parse(type(value), text.encode(), form, f"{path}: not written")
    for field in fields(value):  # pyright: ignore[reportArgumentType]
        if getattr(back, field.name) != getattr(value, field.name):
            raise UserError(f"{path}: not written: {field.name}: would not read back as it is")
    write_text(text, path)


def write_text(text: str, path: str | Path) -> None:
    """Replace the file in one step: a reader, or a crash, sees the old one or the new one."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def to_plain(value: object) -> dict[str, Plain]:
    """The value as dicts, lists and numbers, each number of its field's type."""
    return _adapter(type(value)).dump_python(value, mode="json", warnings=False)


def digest(value: object) -> str:
    """16 hex digits that change with any field, and with nothing else."""
    canonical = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"))
    return sha256(canonical.encode()).hexdigest()[:16]


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    # pydantic hands settings down to plain dataclasses, but takes none beside a bare one: hence `| None`.
    form: Any = cls | None
    return TypeAdapter(form, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))


def _form(path: Path) -> str:
    if path.suffix not in (".json", ".toml"):
        raise UserError(f'{path}: unknown file form "{path.suffix}"; allowed: .json, .toml')
    return path.suffix


def _parse(cls: type[T], content: bytes, form: str, origin: str) -> T:
    return _validated(cls, content if form == ".json" else _toml_as_json(content, origin), origin)


def _toml_as_json(content: bytes, origin: str) -> str:
    try:
        text = content.decode()
        return json.dumps(tomllib.loads(text), default=str)
    except UnicodeDecodeError as error:
        raise UserError(f"{origin}: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        last = content.decode().split("\n")
        end = f"at line {len(last)}, column {len(last[-1]) + 1}"
        raise UserError(f"{origin}: bad TOML: {error}".replace("at end of document", end)) from error


def _validated(cls: type[T], text: str | bytes, origin: str) -> T:
    try:
        value = _adapter(cls).validate_json(text)
    except ValidationError as error:
        raise UserError(f"{origin}: {format_parse_errors(cls, error.errors(include_url=False))}") from None
    if value is None:
        raise UserError(f"{origin}: wanted an object, got null")
    return value


def _without_none(value: Plain) -> Any:
    """TOML has no null: None is told by absence."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value if item is not None]
    return value


def _pretty(value: Plain, indent: str = "", before: int = 0) -> str:
    """JSON in which whatever fits on a line, behind so many characters of it, is on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + before + len(flat) < LINE_WIDTH:
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        named = ((f"{json.dumps(key, ensure_ascii=False)}: ", item) for key, item in value.items())
        lines = [f"{inner}{name}{_pretty(item, inner, len(name))}" for name, item in named]
    else:
        lines = [inner + _pretty(item, inner) for item in value]
    return f"{flat[0]}\n" + ",\n".join(lines) + f"\n{indent}{flat[-1]}"
