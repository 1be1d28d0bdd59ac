"""What the checks of all nouns share: phrases for wrong numbers and names, and one error with all findings.

A check is a generator of messages; it changes nothing and knows nothing of the other checks.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from shardwright.errors import UserError

MAX_SHOWN_MESSAGES = 20


def raise_if_any(messages: Iterable[str]) -> None:
    """Raise one UserError with every message, or return when there is none."""
    found = list(messages)
    if len(found) > MAX_SHOWN_MESSAGES:
        found[MAX_SHOWN_MESSAGES:] = [f"and {len(found) - MAX_SHOWN_MESSAGES} more"]
    if found:
        raise UserError("; ".join(found))


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
