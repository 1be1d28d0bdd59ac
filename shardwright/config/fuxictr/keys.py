"""Keys of a section of a FuxiCTR file: each is read, or named in an error."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from shardwright.errors import UserError, did_you_mean, shorten

MISSING = object()


class Keys:
    """The keys of one section. `where` names file and section in errors."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self._values = dict(values)
        self._used: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a key as it is, or the default if there is no such key."""
        self._used.add(name)
        return self._values.get(name, default)

    def number(self, name: str, default: Any = MISSING) -> float:
        """A number, also one that YAML reads as text, such as 1e-3."""
        value = self._take_or_default(name, default)
        try:
            number = float("" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self.error(name, "wanted a number")
        return number

    def integer(self, name: str, default: Any = MISSING) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise self.error(name, "wanted a whole number")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._take_or_default(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "wanted true or false")
        return value

    def text(self, name: str, default: Any = MISSING) -> str:
        value = self._take_or_default(name, default)
        if not isinstance(value, str):
            raise self.error(name, "wanted text")
        return value

    def widths(self, name: str, default: Collection[int] = ()) -> list[int]:
        """The widths of hidden layers; null is none."""
        value = self.take(name, default) or ()
        if not isinstance(value, list | tuple) or not all(type(width) is int and width > 0 for width in value):
            raise self.error(name, "wanted a list of widths, such as [64, 32]")
        return list(value)

    def same_for_all(self, name: str, default: Any) -> Any:
        """A value for all layers: a list must have it for each of them."""
        value = self._take_or_default(name, default)
        if not isinstance(value, list):
            return value
        if any(item != value[0] for item in value):
            raise self.error(name, "one value for all layers is supported")
        return value[0] if value else default

    def names(self, name: str) -> list[str]:
        """A list of names, or a single one."""
        value = self.take(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, str) for item in listed):
            raise self.error(name, "wanted a name, or a list of names")
        return listed

    def require(self, name: str, allowed: Collection[Any], remedy: str) -> None:
        """Raise an error for a value that is not one of `allowed`; null and a missing key are allowed, too."""
        value = self.take(name)
        if value is not None and value not in allowed:
            raise self.error(name, remedy)

    def ignore(self, names: Collection[str]) -> None:
        """Accept keys that have no meaning here."""
        self._used.update(names)

    def error(self, name: str, remedy: str) -> UserError:
        """An error about the value of a key."""
        value = shorten(str(self._values.get(name)), 100)
        return UserError(f"{self.where}.{name}={value} is not supported; {remedy}")

    def check_all_used(self) -> None:
        """Raise an error for a key that nothing has read; one that is null says nothing and passes."""
        for name, value in self._values.items():
            if name not in self._used and value is not None:
                raise UserError(f"{self.where}.{name} is not supported{did_you_mean(str(name), self._used)}")

    def _take_or_default(self, name: str, default: Any) -> Any:
        value = self.take(name)
        if value is None and default is MISSING:
            raise UserError(f"{self.where}.{name} is missing")
        return default if value is None else value
