"""The dense part of a model as a program of torch.export: a file that needs no code of the model's.

Shape legend: B samples, D columns of numbers, F features, N ids, W columns of pooled vectors.
"""

import io
import json
import re
import zipfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors
from shardwright.layers.embedding import EmbeddingBags

WEIGHT_PREFIX = "dense."  # what names of the program's weights begin with
PICKLED_SUFFIX = ".pt"  # of an archive: examples, which nobody asks for
SPECIALIZED_ERROR = "your code specialized it to be a constant"
UNPICKLED_NAME_PATTERN = (
    r"(weight|tensor)_\d+"  # what is read as it lies there; torch takes other names for pickled objects
)


class DenseProgram(nn.Module):
    """The dense part between tensors."""

    def __init__(self, dense: nn.Module, bags: EmbeddingBags, features: Sequence[str]) -> None:
        super().__init__()
        self.dense = dense
        self.features = tuple(features)
        blank = bags.vectors(torch.empty(0), [torch.empty(0)] * sum(one.pooling == "none" for one in bags.features))
        self.names, self.dims, self.sequences = blank.features, blank.dims, tuple(blank.sequences)

    def forward(
        self, numbers_BD: Tensor, lengths_FB: Tensor, values_N: Tensor, pooled_BW: Tensor, sequences: list[Tensor]
    ) -> Tensor:
        batch = Batch(Jagged(self.features, values_N, lengths_FB), numbers_BD, {})
        vectors = Vectors(self.names, self.dims, pooled_BW, dict(zip(self.sequences, sequences, strict=True)))
        return self.dense(batch, vectors)


def inputs(batch: Batch, vectors: Vectors) -> tuple[Any, ...]:
    """What the program is called with."""
    features = batch.features
    return batch.numbers, features.lengths, features.values, vectors.pooled_BD, [*vectors.sequences.values()]


def write(dense: DenseProgram, example: tuple[Any, ...], path: Path) -> None:
    samples, any_ = torch.export.Dim("samples"), torch.export.Dim.AUTO
    shapes = ({0: samples}, {1: samples}, {0: any_}, {0: samples}, [{0: any_} for _ in dense.sequences])
    try:
        with torch.no_grad():
            made = torch.export.export(dense, example, dynamic_shapes=shapes)
    except Exception as error:  # whatever a user's module does that cannot be traced
        told = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if SPECIALIZED_ERROR in str(error):
            told = "it takes the number of samples for a constant; write x.shape[0] for len(x), and do not branch on it"
        raise UserError(
            f"{type(dense.dense).__name__}, the dense part, cannot be exported by torch.export: {told}"
        ) from error
    torch.export.save(made, written := io.BytesIO())
    with zipfile.ZipFile(written) as archive, zipfile.ZipFile(path, "w") as kept:
        for name in archive.namelist():
            kept.writestr(name, b"" if name.endswith(PICKLED_SUFFIX) else archive.read(name))


def check_dynamic_sizes(path: Path, dense: DenseProgram, example: tuple[Any, ...]) -> None:
    """Whether the program does for other numbers of samples and ids what the dense part does."""
    made = load(path)
    with torch.no_grad():
        try:
            found, wanted = made.forward(*example), dense(*example)
            same = torch.allclose(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
        except (RuntimeError, IndexError):
            same = False
    if not same:
        raise UserError(
            f"{type(dense.dense).__name__}, the dense part, became a program that holds only for as many samples and "
            "ids as it was traced with: it branches on their numbers"
        )


def load(path: Path) -> Any:
    """The program as a module, its weights under the names they had."""
    _refuse_pickles(path)
    import_module("shardwright.kernels.pair_dots")  # its operators must be known before a program that calls them
    try:
        return torch.export.load(path).module(check_guards=False)
    except RuntimeError as error:
        raise UserError(
            f"{path}: torch.export cannot read it ({str(error).splitlines()[0]}); your own operators are known once "
            "the module that registers them is imported"
        ) from error


def _refuse_pickles(path: Path) -> None:
    """torch.export.load would unpickle what an archive says is pickled, and its examples: that may run any code.

    What is left is a program still: whoever makes an export says what is computed where it is served.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = any(one.filename.endswith(PICKLED_SUFFIX) and one.file_size for one in archive.infolist())
            configs = [name for name in archive.namelist() if name.endswith("_config.json")]
            entries = [one for name in configs for one in json.loads(archive.read(name))["config"].values()]
            plain = [re.fullmatch(UNPICKLED_NAME_PATTERN, one["path_name"]) and one["tensor_meta"] for one in entries]
            pickled = pickled or not all(plain) or any(one["use_pickle"] for one in entries)
            pickled = pickled or len(set(archive.namelist())) < len(archive.namelist())
    except (OSError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: no program of torch.export ({error}); export the model anew") from None
    if pickled:
        raise UserError(f"{path}: has pickled parts, which are not read: they may run any code")


def call(program: Any, batch: Batch, vectors: Vectors) -> Tensor:
    return program.forward(*inputs(batch, vectors))  # past its own check of shapes, which takes as long as it does
