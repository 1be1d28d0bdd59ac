"""DIN compared with padded PyTorch; its runs, exports and plans."""

from typing import Any

import numpy as np
import pytest
import torch
from histories import Visits, in_float64, visits
from history_runs import check_export, train_on_movielens
from torch import nn

import shardwright as sw
from shardwright import config
from shardwright.data.loading.loader import to_batch
from shardwright.errors import UserError
from shardwright.layers.target_attention import TargetAttention, segment_softmax, segment_sum
from shardwright.models.click_inputs import ClickInputs
from shardwright.models.din import DIN, din
from shardwright.serving.predictor import Predictor
from shardwright.spec.optimizer import SGD

LENGTHS = [3, 0, 5, 1, 0]
SMALL = {"dim": 4, "attention": [8], "hidden": [8]}


def pad(rows_ND: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded rows (B, L, D), and which of them are rows (B, L)."""
    padded = nn.utils.rnn.pad_sequence(list(rows_ND.split(lengths)), batch_first=True)
    return padded, torch.arange(padded.shape[1]) < torch.tensor(lengths)[:, None]


def padded_attention(layer: TargetAttention, target: torch.Tensor, keys: torch.Tensor, lengths: list[int]):
    keys, mask = pad(keys, lengths)
    target = target[:, None].expand(-1, keys.shape[1], -1)
    weights = layer.score(torch.cat([keys, target, keys * target, keys - target], 2)).squeeze(2)
    if layer.normalize:
        weights = weights.masked_fill(~mask, -torch.inf).softmax(1).nan_to_num(0)
    return (weights * mask).unsqueeze(1).matmul(keys).squeeze(1)


@pytest.mark.parametrize("normalize", [False, True])
def test_target_attention_equals_padded_attention(normalize):
    layer = TargetAttention(3, (7, 5), normalize=normalize).double()
    inputs = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (len(LENGTHS), sum(LENGTHS))]
    upstream = torch.randn(len(LENGTHS), 3, dtype=torch.float64)
    results = []
    for attend in (lambda: layer(*inputs, torch.tensor(LENGTHS)), lambda: padded_attention(layer, *inputs, LENGTHS)):
        out = attend()
        results.append([out, *torch.autograd.grad((out * upstream).sum(), [*inputs, *layer.parameters()])])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    assert torch.equal(results[0][0][[1, 4]], torch.zeros(2, 3, dtype=torch.float64))


def test_sums_do_not_depend_on_other_samples():
    rows, lengths = torch.randn(1000, 5), torch.full((10,), 100)
    for reduce in (segment_sum, lambda rows, lengths: segment_softmax(rows[:, 0], lengths)):
        whole = reduce(rows, lengths)
        alone = [reduce(rows[100 * i : 100 * i + 100], lengths[:1]) for i in range(10)]
        assert torch.equal(whole, torch.cat(alone))


def test_no_history_at_all():
    layer = TargetAttention(3, (4,), normalize=True)
    out = layer(torch.randn(2, 3), torch.empty(0, 3), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(out, torch.zeros(2, 3))
    assert layer(torch.empty(0, 3), torch.empty(0, 3), torch.zeros(0, dtype=torch.int64)).shape == (0, 3)


def test_din_equals_its_formula():
    model = in_float64(din(ClickInputs(Visits(), SGD(lr=0.1)), **SMALL))
    batch = visits(0, 40)
    vectors, features = model.sparse(batch), batch.features.features
    lengths = batch.features.lengths[features.index("seen")].tolist()
    target = torch.cat([vectors["item"], torch.zeros_like(vectors["item"])], 1)
    keys = torch.cat([vectors["seen"], vectors["action"]], 1)
    attended = padded_attention(model.dense.blocks[0], target, keys, lengths)
    pooled = [vectors[name] for name in ("user", "item", "tags")]
    expected = model.dense.deep(torch.cat([batch.dense, *pooled, attended], 1)).squeeze(1)
    torch.testing.assert_close(model(batch), expected, rtol=0, atol=1e-12)
    assert [table.name for table in model.sparse.tables] == ["user", "item", "tags", "action"]


def test_pooling_by_mean_is_the_same_model_without_attention():
    models: list[Any] = [
        din(ClickInputs(Visits(), SGD(lr=0.1)), **SMALL, pooling=pooling) for pooling in ("attention", "mean")
    ]
    attended, pooled = models
    assert attended.dense.deep.steps[0].weight.shape == pooled.dense.deep.steps[0].weight.shape
    assert not pooled.dense.blocks and {f.pooling for f in pooled.sparse.features} == {"sum", "mean"}
    assert pooled(visits(0, 9, dtype=torch.float32)).shape == (9,)


def test_errors_of_options():
    class NoHistories:
        features, num_dense = (("item", 5, False),), 0

    with pytest.raises(UserError, match=r"model.kind=din reads histories, and the data has none; set data.history=50"):
        din(ClickInputs(NoHistories(), SGD(lr=0.1)), **SMALL)
    with pytest.raises(UserError, match='model.pooling="max"; allowed: attention, mean'):
        din(ClickInputs(Visits(), SGD(lr=0.1)), **SMALL, pooling="max")
    with pytest.raises(UserError, match="model.normalize=true with model.pooling=mean, which has no weights"):
        din(ClickInputs(Visits(), SGD(lr=0.1)), **SMALL, pooling="mean", normalize=True)


@pytest.mark.parametrize("count", [0, 40])
def test_din_is_described_on_the_meta_device(count):
    """With and without any history in the batch."""
    model = din(ClickInputs(Visits(), SGD(lr=0.1)), **SMALL)
    batch = visits(0, 40, dtype=torch.float32)
    if not count:
        batch = to_batch(Visits().take(np.arange(0, 200, 5)))
    workload = sw.describe(model, batch)
    blocks = {block.name: block for block in workload.blocks}
    rows = int(batch.features.lengths[3].sum())
    assert blocks["dense.blocks.0"].forward_flops == 2 * rows * (4 * 8 * 8 + 8) and (rows > 0) == (count > 0)
    assert {entry.feature: entry.ids_per_sample for entry in workload.statistics}["seen"] == rows / 40


def test_a_run_on_movielens_and_its_export(tmp_path, monkeypatch):
    settings = train_on_movielens(tmp_path, monkeypatch, "movielens-din", "model.attention=[8]", "model.hidden=[8]")
    check_export(settings, tmp_path)
    sample = {"userId": 3, "movieId": 5, "history": [1, 2], "history_genre": ["Drama", "War"], "history_liked": [1, 0]}
    predictor = Predictor(tmp_path / "out")
    scores = [predictor.answer([sample | {"history": past}])[1][0] for past in ([1, 2], [2, 1])]
    assert scores[0] != scores[1] and 0 < scores[0] < 1


def test_din_is_a_built_in_model():
    assert config.recipe_values("movielens-din")["data"]["history"] == 50
    assert isinstance(din(ClickInputs(Visits(), SGD(lr=0.1)), **SMALL), DIN)
