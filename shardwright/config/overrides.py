"""Dotted key=value overrides of plain values, as on a command line."""

import tomllib
from collections.abc import Sequence
from typing import Any

from shardwright.errors import UserError


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply dotted key=value overrides to `values`, in place."""
    for override in overrides:
        _apply(values, override)
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals_sign, text = override.partition("=")
    if not equals_sign or not key:
        raise UserError(f'override "{override}" is not of the form key=value, such as train.steps=1000')
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.split(".")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise UserError(f'override "{override}": "{section}" is a value, not a section')
    target[last] = {**target[last], "path": value} if isinstance(target.get(last), dict) else value
