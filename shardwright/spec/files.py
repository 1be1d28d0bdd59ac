"""Read and write dataclasses as JSON or TOML files, with one-line errors.

The only module of spec that uses pydantic; values in memory are plain dataclasses. Keys and types are checked here, and
nothing is converted, repaired or ignored. The `verify` method of each dataclass checks whether its values make sense.
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

BY_KIND = Field(discriminator="kind")  # marks a union of dataclasses that differ in `kind`
LINE_WIDTH = 110


def read(cls: type[T], path: str | Path) -> T:
    """Read a value from a .json or .toml file, without verifying it."""
    path = Path(path)
    file_format = _file_format(path)
    check_regular_file(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return _parse(cls, content, file_format, str(path))


def from_plain(cls: type[T], data: object, origin: str) -> T:
    """Make a value from plain data (dicts, lists, numbers); `origin` names the source in errors."""
    return _validate(cls, json.dumps(data, default=str), origin)


def write(value: object, path: str | Path) -> None:
    """Write the file atomically.

    A value that would not read back equal (a NaN, a list instead of a tuple) is an error before anything is written.
    """
    path = Path(path)
    file_format = _file_format(path)
    text = (
        tomli_w.dumps(_without_none(to_plain(value)))
        if file_format == ".toml"
        else _pretty_json(to_plain(value)) + "\n"
    )
    reread = _parse(type(value), text.encode(), file_format, f"{path}: not written")
    for field in fields(value):  # pyright: ignore[reportArgumentType]
        if getattr(reread, field.name) != getattr(value, field.name):
            raise UserError(f"{path}: not written: {field.name}: its value would not read back equal")
    write_text(text, path)


def write_text(text: str, path: str | Path) -> None:
    """Replace the file atomically: a reader, or a crash, sees either the old or the new file."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def to_plain(value: object) -> dict[str, Plain]:
    """The value as dicts, lists and numbers, each number in the type of its field."""
    return _adapter(type(value)).dump_python(value, mode="json", warnings=False)


def digest(value: object) -> str:
    """16 hex digits of a hash over all fields."""
    return digest_plain(to_plain(value))


def digest_plain(data: object) -> str:
    """16 hex digits of a hash over plain values."""
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return sha256(canonical.encode()).hexdigest()[:16]


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    # pydantic applies `config` to nested dataclasses but rejects it for a top-level dataclass: hence `| None`.
    optional: Any = cls | None
    return TypeAdapter(optional, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))


def _file_format(path: Path) -> str:
    if path.suffix not in (".json", ".toml"):
        raise UserError(f'{path}: unknown file format "{path.suffix}"; allowed: .json, .toml')
    return path.suffix


def _parse(cls: type[T], content: bytes, file_format: str, origin: str) -> T:
    return _validate(cls, content if file_format == ".json" else _toml_as_json(content, origin), origin)


def _toml_as_json(content: bytes, origin: str) -> str:
    try:
        text = content.decode()
        return json.dumps(tomllib.loads(text), default=str)
    except UnicodeDecodeError as error:
        raise UserError(f"{origin}: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        lines = content.decode().split("\n")
        last_position = f"at line {len(lines)}, column {len(lines[-1]) + 1}"
        raise UserError(f"{origin}: bad TOML: {error}".replace("at end of document", last_position)) from error


def _validate(cls: type[T], text: str | bytes, origin: str) -> T:
    try:
        value = _adapter(cls).validate_json(_upgrade(cls, text))
    except ValidationError as error:
        raise UserError(f"{origin}: {format_parse_errors(cls, error.errors(include_url=False))}") from None
    if value is None:
        raise UserError(f"{origin}: wanted an object, got null")
    return value


def _upgrade(cls: Any, text: str | bytes) -> str | bytes:
    """The text of a value that an earlier version wrote, in today's form, if the class has a method for it."""
    if not hasattr(cls, "upgrade"):
        return text
    try:
        data = json.loads(text)
    except ValueError:
        return text  # the parser says where it is malformed
    upgraded = cls.upgrade(data) if isinstance(data, dict) else data
    return text if upgraded is data else json.dumps(upgraded)


def _without_none(value: Plain) -> Any:
    """TOML has no null: keys with None are left out."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value if item is not None]
    return value


def _pretty_json(value: Plain, indent: str = "", prefix_length: int = 0) -> str:
    """Format JSON with every value on one line if it fits after `prefix_length` characters."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + prefix_length + len(flat) < LINE_WIDTH:
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        items = ((f"{json.dumps(key, ensure_ascii=False)}: ", item) for key, item in value.items())
        lines = [f"{inner}{name}{_pretty_json(item, inner, len(name))}" for name, item in items]
    else:
        lines = [inner + _pretty_json(item, inner) for item in value]
    return f"{flat[0]}\n" + ",\n".join(lines) + f"\n{indent}{flat[-1]}"
