"""User errors: one-line messages that contain the wrong value and the remedy.

The command line prints the message and exits with code 2.
"""

import difflib
import os
import re
import stat
from collections.abc import Iterable

MAX_VALUE_LENGTH = 300  # characters of a value in an error line
MAX_LINE_LENGTH = 3000


class UserError(ValueError):
    """A user error with a one-line message. Long values are shortened."""

    def __str__(self) -> str:
        long_value = rf"\S{{{MAX_VALUE_LENGTH + 1},}}"
        text = re.sub(long_value, lambda match: shorten(match[0], MAX_VALUE_LENGTH), super().__str__())
        return shorten(text, MAX_LINE_LENGTH)


def shorten(text: str, max_length: int) -> str:
    """Cut the middle out of a text longer than `max_length` characters."""
    if len(text) <= max_length:
        return text
    head, tail = max_length // 2, max_length // 4
    return f"{text[:head]}...({len(text) - head - tail} characters)...{text[-tail:]}"


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """End of an error message: the closest allowed name, or all allowed names if none is close."""
    names = sorted(allowed)
    close = difflib.get_close_matches(name[:MAX_VALUE_LENGTH], names, n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else f"; allowed: {', '.join(names)}"


def check_regular_file(path: str | os.PathLike[str]) -> None:
    """Raise UserError if a path is not a regular file: reading a FIFO would block forever.

    A missing file passes, since opening it reports the error.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    raise UserError(f"{os.fspath(path)}: {kind}; wanted a regular file")


def check_file_name(name: str | os.PathLike[str]) -> None:
    """Raise UserError if a name is not UTF-8: it could be neither written to a manifest nor printed."""
    try:
        os.fspath(name).encode()
    except UnicodeEncodeError:
        raise UserError(f"{ascii(os.fspath(name))}: the name is not UTF-8; rename it") from None
