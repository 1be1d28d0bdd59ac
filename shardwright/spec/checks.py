"""What the checks of all nouns share: phrases for wrong numbers and names, and one error with all findings.

A check is a generator of messages; it changes nothing and knows nothing of the other checks.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from shardwright.errors import UserError

MOST_SHOWN = 20


def judge(messages: Iterable[str]) -> None:
    """Raise one UserError with every message, or return when there is none."""
    found = list(messages)
    if len(found) > MOST_SHOWN:
        found[MOST_SHOWN:] = [f"and {len(found) - MOST_SHOWN} more"]
    if found:
        raise UserError("; ".join(found))


def repeated(what: str, names: Iterable[object]) -> Iterator[str]:
    for name, num in Counter(names).items():
        if num > 1:
            yield f'{what} "{name}" appears {num} times; names must differ'


def positive(subject: str, **numbers: float) -> Iterator[str]:
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            yield f"{subject}: {name} is {number}; wanted more than 0"


def not_negative(subject: str, **numbers: float) -> Iterator[str]:
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            yield f"{subject}: {name} is {number}; wanted 0 or more"
