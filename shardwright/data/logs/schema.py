"""What the columns of a click log are, as a value that a TOML file can hold, and the schemas of known logs."""

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
    """Columns by what they mean; those not named are not read. `categories = ["*"]` means all others."""

    label: str
    positive: float | None = None  # a label of at least this is a click; None: labels are 0 or 1
    numbers: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()  # several categories in one field
    weight: str | None = None  # of a sample
    time: str | None = None  # a number; rows are put in its order
    ignore: tuple[str, ...] = ()  # not among "all others"
    columns: tuple[str, ...] = ()  # their names, where the file has no header
    delimiter: str = ","
    quoted: bool = True
    separator: str = "|"  # inside a list
    hexadecimal: bool = False  # a category is eight hex digits or missing
    tail: tuple[tuple[str, int], ...] = ()  # (category, so many last bytes of it count)

    def verify(self) -> None:
        raise_if_any(_faults(self))

    @property
    def used_columns(self) -> tuple[str, ...]:
        """Every column that is read."""
        single = (self.label, *(name for name in (self.weight, self.time) if name is not None))
        return (*single, *self.numbers, *self.categories, *self.lists)

    @property
    def columns_by_kind(self) -> dict[ColumnKind, tuple[str, ...]]:
        """The columns by how they are read."""
        return {
            "label": (self.label,),
            "weight": () if self.weight is None else (self.weight,),
            "time": () if self.time is None else (self.time,),
            "number": self.numbers,
            "hexadecimal" if self.hexadecimal else "category": self.categories,
            "list": self.lists,
        }

    def resolve(self, columns: Sequence[str], origin: str) -> "Schema":
        """This schema for a file of these columns, "*" spelled out; a column that is missing is an error."""
        known, schema = set(columns), self
        if self.categories == (ALL_OTHERS,):
            taken = {*replace(self, categories=()).used_columns, *self.ignore}
            schema = replace(self, categories=tuple(name for name in columns if name not in taken))
        for name in schema.used_columns:
            if name not in known:
                raise UserError(f'{origin}: no column "{name}"{did_you_mean(name, known)}')
        return schema


def _faults(schema: Schema) -> Iterator[str]:
    yield from check_unique("column", schema.used_columns)
    yield from check_unique("column", schema.columns)
    for what in ("delimiter", "separator"):
        if len(getattr(schema, what).encode()) != 1:
            yield f"{what} is {getattr(schema, what)!r}; wanted one character"
    if not (schema.categories or schema.lists or schema.numbers):
        yield "no numbers, categories or lists: nothing to learn from"
    for name, num_bytes in schema.tail:
        if name not in schema.categories and schema.categories != (ALL_OTHERS,):
            yield f'tail of "{name}", which is no category{did_you_mean(name, schema.categories)}'
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
    """A known log's schema by name, or the one in a TOML file; verified."""
    if name not in SCHEMAS and not name.endswith((".toml", ".json")):
        raise UserError(f'data.schema="{name}" is unknown{did_you_mean(name, SCHEMAS)}; or give a .toml file')
    schema = SCHEMAS.get(name) or files.read(Schema, name)
    schema.verify()
    return schema
