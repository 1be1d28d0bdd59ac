"""Shared checks of the spec's values: error messages for wrong numbers and names, raised as one error.

A check is a generator of messages. It changes nothing and does not depend on other checks.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from shardwright.errors import UserError

MAX_SHOWN_MESSAGES = 20


def raise_if_any(messages: Iterable[str]) -> None:
    """Raise one UserError with all messages; return if there are none."""
    lines = list(messages)
    if len(lines) > MAX_SHOWN_MESSAGES:
        lines[MAX_SHOWN_MESSAGES:] = [f"and {len(lines) - MAX_SHOWN_MESSAGES} more"]
    if lines:
        raise UserError("; ".join(lines))


def check_unique(what: str, names: Iterable[object]) -> Iterator[str]:
    for name, num in Counter(names).items():
        if num > 1:
            yield f'{what} "{name}" appears {num} times; names must differ'


def check_positive(subject: str, **numbers: float) -> Iterator[str]:
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            yield f"{subject}: {name} is {number}; wanted more than 0"


def check_non_negative(subject: str, **numbers: float) -> Iterator[str]:
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            yield f"{subject}: {name} is {number}; wanted 0 or more"
