"""A user's mistake, told in one line that names the thing and the remedy.

The command line prints the line and exits with 2.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave us, told in one line."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """The end of an error line: the closest allowed name, or all of them when none is close."""
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else f"; allowed: {', '.join(names)}"
