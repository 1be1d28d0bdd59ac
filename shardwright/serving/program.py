"""The dense model as a torch.export program: a file that runs without the model's code.

Shape legend: B samples, D numeric features, F features, N ids, W columns of pooled vectors.
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
from torch.export.passes import move_to_device_pass

from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors
from shardwright.layers.embedding import EmbeddingTables

CPU = torch.device("cpu")
WEIGHT_PREFIX = "dense."  # of the names of the program's weights
PICKLED_SUFFIX = ".pt"  # of pickled files in an archive: example inputs, which are not needed
SPECIALIZED_ERROR = "your code specialized it to be a constant"
UNPICKLED_NAME_PATTERN = r"(weight|tensor)_\d+"  # raw tensors; torch unpickles files of other names


class DenseProgram(nn.Module):
    """The dense model as a module whose inputs and output are tensors, as torch.export requires."""

    def __init__(self, dense: nn.Module, bags: EmbeddingTables, features: Sequence[str]) -> None:
        super().__init__()
        self.dense = dense
        self.features = tuple(features)
        self.outputs = bags.outputs
        empty = bags.vectors(torch.empty(0), [torch.empty(0)] * sum(f.pooling == "none" for f in bags.features))
        self.names, self.dims, self.sequences = empty.features, empty.dims, tuple(empty.sequences)

    def forward(
        self, numbers_BD: Tensor, lengths_FB: Tensor, values_N: Tensor, pooled_BW: Tensor, sequences: list[Tensor]
    ) -> Tensor:
        batch = Batch(Jagged(self.features, values_N, lengths_FB), numbers_BD, {})
        vectors = Vectors(self.names, self.dims, pooled_BW, dict(zip(self.sequences, sequences, strict=True)))
        return self.dense(batch, self.outputs(vectors))


def inputs(batch: Batch, vectors: Vectors) -> tuple[Any, ...]:
    """The inputs of the program."""
    features = batch.features
    return batch.numbers, features.lengths, features.values, vectors.pooled_BD, [*vectors.sequences.values()]


def write(dense: DenseProgram, example: tuple[Any, ...], path: Path) -> None:
    """Trace the dense model with example inputs and write the program, without pickled files."""
    samples, auto = torch.export.Dim("samples"), torch.export.Dim.AUTO
    shapes = ({0: samples}, {1: samples}, {0: auto}, {0: samples}, [{0: auto} for _ in dense.sequences])
    try:
        with torch.no_grad():
            program = torch.export.export(dense, example, dynamic_shapes=shapes)
    except Exception as error:  # of any type: a user's module may fail to trace in any way
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if SPECIALIZED_ERROR in str(error):
            reason = "the number of samples became a constant; write x.shape[0] for len(x), and do not branch on it"
        raise UserError(
            f"the dense model {type(dense.dense).__name__} cannot be exported by torch.export: {reason}"
        ) from error
    torch.export.save(program, buffer := io.BytesIO())
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(path, "w") as output:
        for name in archive.namelist():
            output.writestr(name, b"" if name.endswith(PICKLED_SUFFIX) else archive.read(name))


def check_dynamic_sizes(path: Path, dense: DenseProgram, example: tuple[Any, ...]) -> None:
    """Raise an error unless the program equals the dense model for inputs of other sizes than traced."""
    program = load(path)
    with torch.no_grad():
        try:
            actual, expected = program.forward(*example), dense(*example)
            is_equal = torch.allclose(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        except (RuntimeError, IndexError):
            is_equal = False
    if not is_equal:
        raise UserError(
            f"the program of the dense model {type(dense.dense).__name__} is valid only for the numbers of samples and "
            "ids that it was traced with; write x.shape[0] for len(x), and do not branch on sizes"
        )


def load(path: Path, device: torch.device = CPU) -> Any:
    """Load a program as a module on a device; its weights have their names in the dense model."""
    _check_no_pickles(path)
    for kernels in ("pair_dots", "jagged_attention"):  # they register operators that programs call
        import_module(f"shardwright.kernels.{kernels}")
    try:
        exported = torch.export.load(path)
        exported = exported if device.type == "cpu" else move_to_device_pass(exported, device)
        return exported.module(check_guards=False)
    except RuntimeError as error:
        raise UserError(
            f"{path}: torch.export cannot read it ({str(error).splitlines()[0]}); import the modules that register "
            "your own operators first"
        ) from error


def _check_no_pickles(path: Path) -> None:
    """Raise an error if an archive has pickles: torch.export.load unpickles them, which may run any code.

    The program itself still defines what is computed: serve only exports from a trusted source.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            has_pickles = any(info.filename.endswith(PICKLED_SUFFIX) and info.file_size for info in archive.infolist())
            configs = [name for name in archive.namelist() if name.endswith("_config.json")]
            entries = [entry for name in configs for entry in json.loads(archive.read(name))["config"].values()]
            is_raw = [re.fullmatch(UNPICKLED_NAME_PATTERN, e["path_name"]) and e["tensor_meta"] for e in entries]
            has_pickles = has_pickles or not all(is_raw) or any(entry["use_pickle"] for entry in entries)
            has_pickles = has_pickles or len(set(archive.namelist())) < len(archive.namelist())
    except (OSError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a torch.export program ({error}); export the model again") from None
    if has_pickles:
        raise UserError(f"{path}: has pickled parts, which are not read because they may run any code")


def call(program: Any, batch: Batch, vectors: Vectors, device: torch.device = CPU) -> Tensor:
    """Run a program that was loaded on a device; returns logits on the CPU."""
    arguments = inputs(batch, vectors)
    if device.type != "cpu":
        *tensors, sequences = arguments
        moved = [x.to(device) for x in tensors], [x.to(device) for x in sequences]
        return program.forward(*moved[0], moved[1]).cpu()
    return program.forward(*arguments)  # skips the check of shapes in __call__, which takes as long
