"""Conversion of layers to and from torch and TorchRec: same results and names, shared weights."""

from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from clicks import FEATURES, ids, tables
from torch import nn

from shardwright.errors import UserError
from shardwright.jagged import Jagged
from shardwright.layers.convert import from_torch, from_torchrec, to_torch, to_torchrec
from shardwright.layers.embedding import EmbeddingBags
from shardwright.spec.optimizer import SGD
from shardwright.spec.workload import Feature, Table


def test_from_torch_shares_weights_and_keeps_names():
    bags = nn.ModuleList([nn.EmbeddingBag(10, 4, mode="sum"), nn.EmbeddingBag(20, 4, mode="mean")])
    layer = from_torch(list(bags), SGD(lr=0.5))
    assert list(layer.state_dict()) == list(bags.state_dict())
    jagged = Jagged(("0", "1"), torch.tensor([1, 2, 3, 19]), torch.tensor([[1, 1], [2, 0]]))
    expected = [
        bags[0](torch.tensor([1, 2]), torch.tensor([0, 1])),
        bags[1](torch.tensor([3, 19]), torch.tensor([0, 2])),
    ]
    vectors = layer(jagged)
    assert torch.equal(vectors.pooled_BD, torch.cat(expected, 1))
    before = bags[0].weight.detach().clone()
    vectors.pooled_BD.sum().backward()
    assert torch.equal(bags[0].weight[[1, 2]], before[[1, 2]] - 0.5)
    assert layer.state("0") == {}


def test_to_torch_and_back():
    layer = EmbeddingBags(tables(), FEATURES)
    bags = to_torch(layer)
    assert [bag.mode for bag in bags] == ["sum", "mean", "sum"]
    assert bags[1].weight is layer.weight("item") and bags[2].weight is layer.weight("item")
    round_trip = from_torch(bags, names=["site", "seen", "shown"])
    jagged = ids()
    assert torch.equal(round_trip(jagged).pooled_BD, layer(jagged).pooled_BD)


@pytest.mark.parametrize(
    "option", [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"mode": "max"}]
)
def test_errors_name_unsupported_options(option):
    with pytest.raises(UserError, match=f'embedding bag "0" uses {next(iter(option))}'):
        from_torch([nn.EmbeddingBag(4, 2, **option)])


def test_errors_name_unsupported_dtypes():
    with pytest.raises(UserError, match='table "0" is complex64; wanted one of float64'):
        from_torch([nn.EmbeddingBag(4, 2, dtype=torch.complex64)])


def test_unpooled_features_are_not_converted_to_torch():
    with pytest.raises(UserError, match='feature "x" is not pooled'):
        to_torch(EmbeddingBags([Table("t", 4, 2)], [Feature("x", "t", "none")]))


class PoolingType(Enum):
    SUM = "SUM"
    MEAN = "MEAN"


class Collection(nn.Module):
    """The methods of torchrec's EmbeddingBagCollection that the conversion uses."""

    def __init__(self, tables: list, is_weighted: bool = False, device: torch.device | None = None) -> None:
        super().__init__()
        self._configs = tables
        self._is_weighted = is_weighted
        self.embedding_bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(table.num_embeddings, table.embedding_dim, mode=table.pooling.value.lower())
                for table in tables
            }
        )

    def embedding_bag_configs(self) -> list:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted


def test_torchrec_round_trip_keeps_names_and_weights():
    configs = [
        SimpleNamespace(
            name="t1", num_embeddings=8, embedding_dim=4, feature_names=["a", "b"], pooling=PoolingType.SUM
        ),
        SimpleNamespace(name="t2", num_embeddings=6, embedding_dim=2, feature_names=["c"], pooling=PoolingType.MEAN),
    ]
    collection = Collection(configs)
    layer = from_torchrec(collection, SGD(lr=0.1))
    assert list(layer.state_dict()) == list(collection.state_dict())
    assert layer.weight("t1") is collection.embedding_bags["t1"].weight
    assert [(f.name, f.table, f.pooling) for f in layer.features] == [
        ("a", "t1", "sum"),
        ("b", "t1", "sum"),
        ("c", "t2", "mean"),
    ]
    exported = to_torchrec(layer, Collection, SimpleNamespace, PoolingType)
    assert [vars(config) for config in exported.embedding_bag_configs()] == [vars(config) for config in configs]
    assert exported.embedding_bags["t2"].weight is layer.weight("t2")


def test_torchrec_weights_and_shared_ids():
    configs = [
        SimpleNamespace(name=name, num_embeddings=8, embedding_dim=4, feature_names=["a"], pooling=PoolingType.SUM)
        for name in ("t1", "t2")
    ]
    layer = from_torchrec(Collection(configs, is_weighted=True))
    assert layer.weighted and [(f.name, f.ids) for f in layer.features] == [("a@t1", "a"), ("a@t2", "a")]
    exported = to_torchrec(layer, Collection, SimpleNamespace, PoolingType)
    assert exported.is_weighted()
    assert [config.feature_names for config in exported.embedding_bag_configs()] == [["a"], ["a"]]


def test_tables_that_share_a_weight_are_refused():
    bag = nn.EmbeddingBag(4, 2, mode="sum")
    with pytest.raises(UserError, match='tables "a" and "b" share one weight'):
        from_torch([bag, bag], SGD(lr=0.1), names=["a", "b"])


def test_mixed_pooling_of_one_table_is_not_converted_to_torchrec():
    with pytest.raises(UserError, match=r'table "item" is pooled as \[.mean., .sum.\]'):
        to_torchrec(EmbeddingBags(tables(), FEATURES), Collection, SimpleNamespace, PoolingType)
