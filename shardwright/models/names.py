"""Models by the names that recipes use."""

from collections.abc import Callable
from types import MappingProxyType

from torch import nn

from shardwright.models.ctr import CTR_MODELS
from shardwright.models.din import din
from shardwright.models.gpt import gpt, moe_gpt
from shardwright.models.graphsage import graphsage
from shardwright.models.hstu import hstu

MODELS: MappingProxyType[str, Callable[..., nn.Module]] = MappingProxyType(
    {**CTR_MODELS, "din": din, "hstu": hstu, "gpt": gpt, "moe_gpt": moe_gpt, "graphsage": graphsage}
)
