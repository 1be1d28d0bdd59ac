"""The commands `shardwright data`: describe and inspect click logs, inspect and tokenize texts."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardwright.errors import UserError, did_you_mean

# Keys of a recipe's section `data` that `data inspect` accepts: for click logs, and for texts.
LOG_KEYS = ("schema", "encoding", "strict", "memory", "cache")
TEXT_KEYS = ("tokenizer", "end", "field")

data = typer.Typer(help="Describe and inspect click logs, inspect and tokenize texts.", no_args_is_help=True)


@data.command()
def inspect(
    path: Annotated[str, typer.Argument(metavar="FILE", help="A click log, a text or a token file; or a directory.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of a recipe's section data.")
    ] = None,
) -> None:
    """Summarize a click log, or a text: its tokens, documents, their lengths, and its first tokens.

    For a click log: rows, base rate, and each column's values, skew and suggested table size.

    \b
    shardwright data inspect train.tsv.gz                        Criteo and Avazu logs are recognized by their columns
    shardwright data inspect ml-100k                             a MovieLens directory
    shardwright data inspect mine.parquet schema=mine.toml       any other log: draft a schema with `data schema`
    shardwright data inspect train.tsv.gz strict=false output=statistics.json
    shardwright data inspect books.tokens                        a token file
    shardwright data inspect books                               a folder of texts: .txt, .md, .jsonl, .parquet
    """
    from shardwright.config.overrides import apply_overrides

    keys: dict[str, Any] = apply_overrides({}, settings or ())
    kind = keys.pop("kind", "") or ("log" if "schema" in keys else _guess_kind(path))
    if kind == "tokens":
        _inspect_tokens(path, keys)
    else:
        _inspect_log(path, kind, keys)


@data.command()
def schema(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="A CSV, TSV or Parquet file, or a directory of Parquet.")
    ],
) -> None:
    """Draft the schema of a click log from its first rows: label, time, numbers, categories, lists. Check it.

    \b
    shardwright data schema mine.csv > mine.toml
    shardwright data inspect mine.csv schema=mine.toml
    shardwright train log-deepfm data=mine.csv data.schema=mine.toml
    """
    from shardwright.data.logs.draft import draft_schema

    print(draft_schema(path), end="")


@data.command()
def tokenize(
    path: Annotated[str, typer.Argument(metavar="TEXT", help="A text file, or a folder of texts.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The directory to write.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=f"Keys: {', '.join(TEXT_KEYS)}.")
    ] = None,
) -> None:
    """Tokenize texts into a token file, which recipes train on: .txt and .md, .jsonl, .parquet, plain or compressed.

    A text file is one document; a line of JSON or a row of Parquet is one, too. Tokens are bytes unless a tokenizer is
    given.

    \b
    shardwright data tokenize books books.tokens
    shardwright data tokenize web.jsonl.zst web.tokens field=content
    shardwright data tokenize books books.tokens tokenizer=tokenizer.json end="<|endoftext|>"
    """
    from shardwright.config.overrides import apply_overrides
    from shardwright.data.tokens.sequences import tokenize
    from shardwright.data.tokens.token_file import TokenFile
    from shardwright.data.tokens.tokenizer import open_tokenizer

    options = _text_options(apply_overrides({}, settings or ()))
    if output.exists():
        raise UserError(f"{output}: exists; remove it, or choose another directory")
    tokenize(Path(path), options, open_tokenizer(options.tokenizer, options.end), output)
    manifest = TokenFile(output).manifest
    console = Console()
    console.print(
        f"{manifest.num_tokens:,} tokens of {manifest.num_documents:,} documents, tokenizer {manifest.tokenizer}",
        highlight=False,
    )
    console.print(f"tokens  {output}", highlight=False, soft_wrap=True)


def _guess_kind(path: str) -> str:
    """The kind of a known click log; else tokens, if the suffixes are those of texts."""
    from shardwright.data.logs.click_log import guess_kind
    from shardwright.data.tokens.documents import LINE_SUFFIXES, TEXT_SUFFIXES, document_suffix
    from shardwright.data.tokens.token_file import is_token_file

    if is_token_file(Path(path)):
        return "tokens"
    if kind := guess_kind(path):
        return kind
    if any(document_suffix(file) in (*TEXT_SUFFIXES, *LINE_SUFFIXES) for file in (Path(path), *Path(path).rglob("*"))):
        return "tokens"
    raise UserError(
        f"{path}: not a known log format; describe its columns with schema=FILE.toml, which "
        f"`shardwright data schema {path} > FILE.toml` drafts"
    )


def _text_options(keys: dict[str, Any]) -> Any:
    from shardwright.data.tokens.sequences import TextOptions
    from shardwright.spec import files

    for key in keys:
        if key not in TEXT_KEYS:
            raise UserError(f'unknown key "{key}"{did_you_mean(key, TEXT_KEYS)}')
    return files.from_plain(TextOptions, keys, "text")


def _inspect_tokens(path: str, keys: dict[str, Any]) -> None:
    from shardwright.data.logs.convert import CACHE_DIRECTORY
    from shardwright.data.tokens.sequences import open_token_file
    from shardwright.data.tokens.summary import format_tokens
    from shardwright.data.tokens.token_file import TokenFile, is_token_file

    cache = keys.pop("cache", CACHE_DIRECTORY)
    options = _text_options(keys)
    if is_token_file(Path(path)):
        if keys:
            raise UserError(f"{next(iter(keys))}={next(iter(keys.values()))}: {path} is tokenized already; drop it")
        token_file = TokenFile(Path(path))
        token_file.verify()
    else:
        token_file = open_token_file(path, options, cache)
    _print_tables(format_tokens(token_file))


def _inspect_log(path: str, kind: str, keys: dict[str, Any]) -> None:
    from shardwright.data.logs import summary
    from shardwright.data.logs.click_log import open_log
    from shardwright.spec import files

    output = keys.pop("output", "")
    for key in keys:
        if key not in LOG_KEYS:
            raise UserError(f'unknown key "{key}"{did_you_mean(key, (*LOG_KEYS, "kind", "output"))}')
    inspection = summary.inspect_log(open_log(kind, path, split={"test": 0.0}, **keys))
    _print_tables(summary.format_inspection(inspection))
    if output:
        files.write(summary.log_statistics(inspection), output)
        Console().print(f"statistics  {output}", highlight=False, soft_wrap=True)


def _print_tables(tables: Any) -> None:
    """Print tables of text: title, column names, rows."""
    from rich.table import Table
    from rich.text import Text

    console = Console(width=max(Console().width, 104))
    for title, columns, rows in tables:
        table = Table(title=title, title_justify="left", box=None, show_header=any(columns), pad_edge=False)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table, soft_wrap=True)
        console.print()
