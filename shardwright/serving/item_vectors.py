"""The vectors of all items of a two-tower model, as a file of its export.

items.safetensors has `vectors` (N, D) and `ids` (N, 1), the ids that the items have in a batch: rows of their table if
values have a vocabulary or are hashed.

Shape legend: N items, D columns of a vector.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from shardwright.checkpoint import arrays
from shardwright.config import Settings
from shardwright.data.features.transforms import Transforms
from shardwright.data.loading.loader import to_batch
from shardwright.data.sources.source import Source
from shardwright.errors import UserError
from shardwright.jagged import select
from shardwright.layers.in_batch_softmax import ITEM
from shardwright.models.two_tower import TwoTower
from shardwright.runtime.rank_group import ONE_RANK
from shardwright.runtime.run import recipe
from shardwright.runtime.run.retrieval import SampleReader, Selection, join_items
from shardwright.serving import manifest, program
from shardwright.serving.manifest import ITEMS_FILE, PROGRAM_FILE, ExportManifest
from shardwright.serving.mapped_tables import MappedTables

ITEMS_AT_ONCE = 1024


def open_data(settings: Settings, transforms: Transforms) -> Source:
    """The data of a run, whose items are exported; raises an error if they are not those that the run had."""
    source = recipe.make_source(settings)
    current = getattr(source, "transforms", None)
    if isinstance(current, Transforms) and current.digest != transforms.digest:
        raise UserError(
            f"{settings.data.arguments.get('path', 'data')}: the data have changed since this run, so its items cannot "
            "be exported; restore them, or train again"
        )
    return source


def add(export: ExportManifest, folder: Path, model: TwoTower, source: Source) -> ExportManifest:
    """Write the vectors of the items of a source, held-out samples included; returns the manifest with the new file."""
    reader, parts = SampleReader(model, getattr(source, "unknown_ids", ()), ONE_RANK), [source]
    for name in ("evaluation", "test"):
        held_out = getattr(source, name)() if hasattr(source, name) else None
        parts += [held_out] if held_out is not None and held_out.size else []
    items = join_items(*((part, reader.read(part)) for part in parts))
    if not len(items.ids_N):
        raise UserError(
            f'the data have no item: every "{model.item}" is missing or rare; lower data.encoding.min_count'
        )
    tables, dense = MappedTables(export, folder), program.load(folder / PROGRAM_FILE)
    vectors = torch.cat([_compute(dense, tables, export, part) for part in items.selections])
    contents = {
        "ids": torch.from_numpy(items.ids_N).unsqueeze(1),
        "vectors": vectors[torch.from_numpy(items.order_N)].contiguous(),
    }
    arrays.write(folder / ITEMS_FILE, contents, {})
    return replace(export, digests=export.digests | {ITEMS_FILE: manifest.file_digest(folder / ITEMS_FILE)})


@torch.no_grad()
def _compute(dense: object, tables: MappedTables, export: ExportManifest, items: Selection) -> torch.Tensor:
    """(N, D) the vectors of the items of samples."""
    vectors = []
    for start in range(0, items.size, ITEMS_AT_ONCE):
        batch = to_batch(items.take(np.arange(start, min(start + ITEMS_AT_ONCE, items.size))))
        batch = replace(batch, features=select(batch.features, export.features))
        vectors.append(program.call(dense, batch, tables.lookup(batch.features))[:, ITEM])
    return torch.cat(vectors)
