"""Arguments of a training engine: those that make it run a split, and a user's by name."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.errors import UserError
from shardwright.planner.layers.layer_search import LayerSplit

WHOLE_NUMBER = re.compile(r"\d{1,15}")
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")  # of a shell: $NAME, ${NAME}, ${NAME:-default}
ARRAY_END = ")"
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """`flags`: each with its values, quoted for a shell. `notes`: what a user has to add, and where the engine does not
    do what was planned."""

    flags: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> list[str]:
        """The flags as a program receives them."""
        return [*split_flags(self.flags)]


def offload_notes(split: LayerSplit, remedy: str) -> Iterator[str]:
    """That no flag offloads activations as planned; `remedy`: what the engine has in its place."""
    if any(split.degrees.offload):
        moved = ", ".join(f"{stage.host / 1e9:.1f}" for stage in split.memory)
        yield f"the plan moves {moved} GB of activations to the host, by pipeline rank; no flag here does so: {remedy}"


def split_flags(tokens: Iterable[str]) -> Iterator[str]:
    """Split entries that hold a flag and its values; others stay as they are."""
    for token in tokens:
        if not re.match(r"\s*--\S+\s", token):
            yield token
            continue
        try:
            yield from shlex.split(token)
        except ValueError:  # an apostrophe
            yield from token.split()


def split_arrays(tokens: Iterable[str]) -> Iterator[str]:
    """Take NAME=( and NAME+=( of a shell's arrays off their first words, and ) off their last."""
    for token in tokens:
        word = re.sub(r"^\w+\+?=\(", "", token.strip())
        if word.endswith(")") and word.count(")") > word.count("("):
            yield word[:-1]
            yield ARRAY_END
        else:
            yield word


def replace_variables(tokens: Iterable[str]) -> Iterator[str]:
    """Replace variables of a shell that were assigned before, or that have a default."""
    values: dict[str, str] = {}

    def value_of(match: re.Match[str]) -> str:
        name, default, plain_name = match.groups()
        return values.get(name or plain_name, match[0] if default is None else default)

    for token in tokens:
        text = VARIABLE.sub(value_of, token)
        if assignment := ASSIGNMENT.fullmatch(text):
            values[assignment[1]] = assignment[2]
        yield text


@dataclass(frozen=True, slots=True)
class FlagValues:
    """Values of each flag that is given; of a repeated flag, the last ones."""

    values: Mapping[str, tuple[str, ...]]

    def has(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str, default: str = "") -> str:
        return next(iter(self.values.get(name, ())), default)

    def number(self, name: str, default: int | None = None) -> int:
        """Without a default, the flag must be given."""
        if name not in self.values:
            if default is None:
                raise UserError(f"no {name}; add it")
            return default
        text = self.text(name)
        if not WHOLE_NUMBER.fullmatch(text):
            raise UserError(f"{name} is {text!r}; wanted a whole number")
        return int(text)

    def degree(self, name: str, default: int | None = None) -> int:
        """A number of at least 1."""
        if (value := self.number(name, default)) < 1:
            raise UserError(f"{name} is {value}; wanted 1 or more")
        return value


def parse_flags(tokens: Sequence[str]) -> FlagValues:
    """`tokens`: arguments as a program receives them, entries of EngineFlags, or words of a shell script."""
    values: dict[str, tuple[str, ...]] = {}
    name = ""
    for token in split_flags(split_arrays(replace_variables(tokens))):
        if token.startswith("--"):
            name, has_value, value = token.partition("=")
            values[name] = (value,) if has_value else ()
        elif token == ARRAY_END:
            name = ""
        elif name and token:
            values[name] += (token,)
    return FlagValues(values)
