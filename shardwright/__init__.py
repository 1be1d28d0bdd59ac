"""Shardwright: an engine that shards and trains models that outgrow a device.

This is the public API. Names are imported at their first use, so that `shardwright --help` and loader workers do not
import torch.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.comm.mesh import Mesh
    from shardwright.comm.transport.servers import TableServers
    from shardwright.data.loading.loader import Loader
    from shardwright.data.logs.click_log import open_log
    from shardwright.data.sources.synthetic import ClickStream
    from shardwright.errors import UserError
    from shardwright.jagged import Batch, Jagged, Vectors
    from shardwright.layers.convert import from_torch, from_torchrec, to_torch, to_torchrec
    from shardwright.layers.embedding import EmbeddingBags
    from shardwright.layers.embedding_dict import EmbeddingBagsDict
    from shardwright.layers.loss import BinaryLoss, ClassLoss
    from shardwright.measure.describe import describe
    from shardwright.runtime.build import build
    from shardwright.runtime.dense_layout import mesh_for
    from shardwright.runtime.job import Job
    from shardwright.runtime.placements import allow_staleness, keep_in_host_memory, keep_on_disk, keep_on_servers
    from shardwright.runtime.planning import plan_for
    from shardwright.runtime.run.callback import Callback, RunResult, RunStart
    from shardwright.runtime.run.train import train
    from shardwright.serving.export import export
    from shardwright.serving.predictor import Predictor
    from shardwright.spec.optimizer import LAMB, SGD, AdaGrad, Adam, PartialRowWiseAdam, RowWiseAdaGrad
    from shardwright.spec.plan import Bounded, Plan
    from shardwright.spec.timeline import Timeline
    from shardwright.spec.workload import Feature, Growth, Table, Workload

    __version__: str

_NAMES_BY_MODULE = MappingProxyType(
    {
        "comm.mesh": ("Mesh",),
        "comm.transport.servers": ("TableServers",),
        "data.loading.loader": ("Loader",),
        "data.logs.click_log": ("open_log",),
        "data.sources.synthetic": ("ClickStream",),
        "errors": ("UserError",),
        "jagged": ("Batch", "Jagged", "Vectors"),
        "layers.embedding": ("EmbeddingBags",),
        "layers.embedding_dict": ("EmbeddingBagsDict",),
        "layers.loss": ("BinaryLoss", "ClassLoss"),
        "layers.convert": ("from_torch", "from_torchrec", "to_torch", "to_torchrec"),
        "measure.describe": ("describe",),
        "runtime.build": ("build",),
        "runtime.dense_layout": ("mesh_for",),
        "runtime.job": ("Job",),
        "runtime.placements": ("allow_staleness", "keep_in_host_memory", "keep_on_disk", "keep_on_servers"),
        "runtime.planning": ("plan_for",),
        "runtime.run.callback": ("Callback", "RunResult", "RunStart"),
        "runtime.run.train": ("train",),
        "serving.export": ("export",),
        "serving.predictor": ("Predictor",),
        "spec.optimizer": ("LAMB", "SGD", "AdaGrad", "Adam", "PartialRowWiseAdam", "RowWiseAdaGrad"),
        "spec.plan": ("Bounded", "Plan"),
        "spec.timeline": ("Timeline",),
        "spec.workload": ("Feature", "Growth", "Table", "Workload"),
    }
)

__all__ = (
    "AdaGrad",
    "Adam",
    "Batch",
    "BinaryLoss",
    "Bounded",
    "Callback",
    "ClassLoss",
    "ClickStream",
    "EmbeddingBags",
    "EmbeddingBagsDict",
    "Feature",
    "Growth",
    "Jagged",
    "Job",
    "LAMB",
    "Loader",
    "Mesh",
    "Plan",
    "PartialRowWiseAdam",
    "Predictor",
    "RowWiseAdaGrad",
    "RunResult",
    "RunStart",
    "SGD",
    "Table",
    "TableServers",
    "Timeline",
    "UserError",
    "Vectors",
    "Workload",
    "build",
    "describe",
    "export",
    "from_torch",
    "from_torchrec",
    "open_log",
    "allow_staleness",
    "keep_in_host_memory",
    "keep_on_disk",
    "keep_on_servers",
    "mesh_for",
    "plan_for",
    "to_torch",
    "to_torchrec",
    "train",
)


def __dir__() -> list[str]:
    """Names for completion, including names that are not imported yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("shardwright")
    for module, names in _NAMES_BY_MODULE.items():
        if name in names:
            return getattr(import_module(f"shardwright.{module}"), name)
    raise AttributeError(f"module shardwright has no attribute {name!r}")
