"""Schema of a click log: the kind of each column, from a TOML file; and the schemas of known logs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardwright.errors import UserError, did_you_mean
from shardwright.kernels.text_rows import ColumnKind
from shardwright.spec import files
from shardwright.spec.checks import check_unique, raise_if_any

ALL_OTHERS = "*"


@dataclass(frozen=True, slots=True)
class Schema:
    """Columns by meaning; other columns are not read. `categories = ["*"]` means all other columns."""

    label: str  # empty: labels are not read, as of a file to score
    positive: float | None = None  # a label of at least this value is a click; None: labels are 0 or 1
    numbers: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()  # each field holds several categories
    weight: str | None = None  # sample weight
    time: str | None = None  # a number; rows are sorted by it
    ignore: tuple[str, ...] = ()  # excluded from "*"
    columns: tuple[str, ...] = ()  # column names of a file without header
    delimiter: str = ","
    quoted: bool = True
    separator: str = "|"  # between the items of a list
    hexadecimal: bool = False  # categories are eight hex digits or missing
    tail: tuple[tuple[str, int], ...] = ()  # (category, number of its last bytes that are used)

    def verify(self) -> None:
        raise_if_any(_validation_errors(self))

    @property
    def used_columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        single = (name for name in (self.label, self.weight, self.time) if name)
        return (*single, *self.numbers, *self.categories, *self.lists)

    @property
    def columns_by_kind(self) -> dict[ColumnKind, tuple[str, ...]]:
        """Column names by the kind that the parser reads them as."""
        return {
            "label": (self.label,) if self.label else (),
            "weight": () if self.weight is None else (self.weight,),
            "time": () if self.time is None else (self.time,),
            "number": self.numbers,
            "hexadecimal" if self.hexadecimal else "category": self.categories,
            "list": self.lists,
        }

    def resolve(self, columns: Sequence[str], origin: str) -> "Schema":
        """Expand "*" for a file with `columns`; raises UserError if a column is missing."""
        available, schema = set(columns), self
        if self.categories == (ALL_OTHERS,):
            excluded = {*replace(self, categories=()).used_columns, *self.ignore}
            schema = replace(self, categories=tuple(name for name in columns if name not in excluded))
        for name in schema.used_columns:
            if name not in available:
                raise UserError(f'{origin}: no column "{name}"{did_you_mean(name, available)}')
        return schema


def _validation_errors(schema: Schema) -> Iterator[str]:
    if not schema.label:
        yield "label is empty; name the column that is to be predicted"
    yield from check_unique("column", schema.used_columns)
    yield from check_unique("column", schema.columns)
    for key in ("delimiter", "separator"):
        if len(getattr(schema, key).encode()) != 1:
            yield f"{key} is {getattr(schema, key)!r}; wanted one character"
    if not (schema.categories or schema.lists or schema.numbers):
        yield "no numbers, categories or lists: a model would have no features; list at least one column"
    for name, num_bytes in schema.tail:
        if name not in schema.categories and schema.categories != (ALL_OTHERS,):
            yield f'tail of "{name}", which is not in categories{did_you_mean(name, schema.categories)}'
        if num_bytes < 1:
            yield f'tail of "{name}" is {num_bytes}; wanted 1 or more'


_INTEGERS = tuple(f"I{number}" for number in range(1, 14))
_HASHES = tuple(f"C{number}" for number in range(1, 27))

SCHEMAS = MappingProxyType(
    {
        "criteo": Schema(
            label="label",
            numbers=_INTEGERS,
            categories=_HASHES,
            columns=("label", *_INTEGERS, *_HASHES),
            delimiter="\t",
            quoted=False,
            hexadecimal=True,
        ),
        "avazu": Schema(label="click", categories=(ALL_OTHERS,), ignore=("id",), tail=(("hour", 2),)),
    }
)


def read_schema(name: str) -> Schema:
    """Return the schema of a known log by name, or read and verify it from a TOML or JSON file."""
    if name not in SCHEMAS and not name.endswith((".toml", ".json")):
        raise UserError(f'data.schema="{name}" is unknown{did_you_mean(name, SCHEMAS)}; or give a .toml file')
    schema = SCHEMAS.get(name) or files.read(Schema, name)
    schema.verify()
    return schema
