"""Files that a run is evaluated on: `data.test`, `data.valid`, and the file that a finished run is evaluated on."""

from collections.abc import Mapping
from dataclasses import replace

from shardwright.config import DataSettings
from shardwright.config.sections import Files
from shardwright.data.features.transforms import Transforms
from shardwright.data.logs.click_log import convert_files
from shardwright.data.logs.convert import CACHE_DIRECTORY
from shardwright.data.logs.schema import Schema
from shardwright.data.sources.clicks import ClickLog
from shardwright.data.sources.held_out import HeldOutCaches, HeldOutFiles
from shardwright.data.sources.source import Source
from shardwright.errors import UserError

FILE_KINDS = ("criteo", "avazu", "log")  # whose rows may also come from other files


def split_beside_files(data: DataSettings) -> DataSettings:
    """The settings without the default test share, if rows of files are held out: then all rows of the log train,
    except the share that `data.split` gives to the part without files."""
    given = data.arguments.get("split", {})
    parts = {part: key for part, (key, files) in _files_by_part(data).items() if files}
    if not parts or not isinstance(given, Mapping):
        return data
    for part, key in parts.items():
        _check_kind(data, key)
        if given.get(part):
            raise UserError(f"{key} and data.split.{part}={given[part]}: drop one, or set data.split.{part}=0")
    return data.model_copy(update={"split": {"test": 0.0, **given}})


def attach_files(data: DataSettings, source: Source) -> Source:
    """The training log with the files that its validation or test rows are from."""
    if not isinstance(source, ClickLog):
        return source
    caches = {
        part: _convert(data, source.schema, key, files) for part, (key, files) in _files_by_part(data).items() if files
    }
    return replace(source, held_out=HeldOutCaches(**caches)) if caches else source


def open_files(data: DataSettings, transforms: Transforms, key: str, files: Files) -> HeldOutFiles:
    """The rows of files, as a source with the transforms of a run. `key` names the files in errors."""
    return HeldOutFiles(_convert(data, transforms.schema, key, files), transforms)


def _files_by_part(data: DataSettings) -> dict[str, tuple[str, Files]]:
    """The key and the files of each part of a split."""
    return {"test": ("data.test", data.test), "validation": ("data.valid", data.valid)}


def _convert(data: DataSettings, schema: Schema, key: str, files: Files) -> tuple[str, ...]:
    """Convert files with the columns of the training log; returns their caches."""
    _check_kind(data, key)
    options = {name: data.arguments[name] for name in ("strict", "cache") if name in data.arguments}
    return convert_files(key, files, data.kind, schema, **{"cache": CACHE_DIRECTORY, **options})


def _check_kind(data: DataSettings, key: str) -> None:
    if data.kind not in FILE_KINDS:
        raise UserError(f"{key} is for data.kind={', '.join(FILE_KINDS)}, not {data.kind}; drop it")
