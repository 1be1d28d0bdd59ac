"""HSTU-like layers compared with padded PyTorch; their runs, exports and plans."""

import numpy as np
import pytest
import torch
from histories import Visits, in_float64, visits
from history_runs import check_export, train_on_movielens
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

import shardwright as sw
from shardwright import config
from shardwright.data.loading.loader import to_batch
from shardwright.errors import UserError
from shardwright.kernels import jagged_attention as kernel
from shardwright.kernels.jagged_attention import jagged_attention
from shardwright.layers.sequence_encoder import SequenceLayer, append_targets
from shardwright.models.click_inputs import ClickInputs
from shardwright.models.hstu import hstu
from shardwright.spec.optimizer import SGD

LENGTHS = [3, 0, 20, 1, 8, 9, 3]
ENCODER = {"num_layers": 2, "num_heads": 2, "head_dim": 3, "max_distance": 4}
SMALL = {"dim": 4, "encoder": ENCODER, "hidden": [8]}


def padded(rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return pad_sequence(list(rows.split(lengths)), batch_first=True)


def unpadded(rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])


def padded_attention(query, key, value, bias, lengths: list[int]) -> torch.Tensor:
    query, key, value = (padded(x, lengths).transpose(1, 2) for x in (query, key, value))
    size, num = query.shape[2], torch.tensor(lengths)
    distance = (torch.arange(size)[:, None] - torch.arange(size)).clamp(0, len(bias) - 1)
    weights = functional.silu(query @ key.mT + bias[distance].permute(2, 0, 1)) / num.clamp(min=1).view(-1, 1, 1, 1)
    is_key = (torch.arange(size) < num[:, None])[:, None, None] & torch.ones(size, size, dtype=torch.bool).tril()
    return unpadded((weights * is_key @ value).transpose(1, 2), lengths)


@pytest.mark.parametrize("max_scores", [1, 1 << 22])
def test_attention_and_gradients_equal_padded_attention(monkeypatch, max_scores):
    monkeypatch.setattr(kernel, "MAX_SCORES", max_scores)  # one sequence at a time, or all of a group
    shapes = (sum(LENGTHS), 2, 3), (sum(LENGTHS), 2, 3), (sum(LENGTHS), 2, 5), (6, 2)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    upstream, results = torch.randn(shapes[2], dtype=torch.float64), []
    for lengths, attend in ((torch.tensor(LENGTHS), jagged_attention), (LENGTHS, padded_attention)):
        out = attend(*inputs, lengths)
        results.append([out, *torch.autograd.grad((out * upstream).sum(), inputs)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_gradients_of_attention_by_differences():
    inputs = [torch.randn(4, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(2, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: jagged_attention(*x, torch.tensor([3, 1])), (*inputs, bias))


def test_the_operator_is_valid():
    inputs = [torch.randn(4, 1, 2, requires_grad=True) for _ in range(3)]
    arguments = (*inputs, torch.randn(2, 1, requires_grad=True), torch.tensor([3, 1]))
    torch.library.opcheck(torch.ops.shardwright.jagged_attention.default, arguments)


def test_errors_of_the_operator():
    x, bias = torch.randn(4, 2, 3), torch.randn(5, 2)
    for arguments, message in (
        ((x, x[:3], x, bias, torch.tensor([4])), r"wanted \(N, H, K\), \(N, H, K\) and \(N, H, V\)"),
        ((x, x, x, bias[:, :1], torch.tensor([4])), r"biases are \(5, 1\); wanted \(distances, 2 heads\)"),
        ((x, x, x, bias, torch.tensor([3])), "lengths of sequences add up to 3, with 4 queries"),
        ((x, x, x, bias, torch.tensor([5, -1])), "lengths of sequences add up to 4, with 4 queries"),
    ):
        with pytest.raises(UserError, match=message):
            jagged_attention(*arguments)


def test_a_layer_equals_its_formula_and_is_causal():
    layer = SequenceLayer(6, num_heads=2, head_dim=3, max_distance=4).double()
    nn.init.normal_(layer.distance.weight)
    x = torch.randn(sum(LENGTHS), 6, dtype=torch.float64)
    gate, *values = functional.silu(layer.expand(layer.norm(x))).chunk(4, 1)
    value, query, key = (part.view(-1, 2, 3) for part in values)
    attended = padded_attention(query, key, value, layer.distance.weight, LENGTHS).flatten(1)
    out = layer(x, torch.tensor(LENGTHS))
    torch.testing.assert_close(out, x + layer.out(layer.attended_norm(attended) * gate), rtol=0, atol=1e-10)
    changed = x.clone()
    changed[10, 0] += 1  # inside of the sequence of 20 positions from 3 on
    is_same = (layer(changed, torch.tensor(LENGTHS)) == out).all(1)
    assert is_same[:10].all() and not is_same[10:23].any() and is_same[23:].all()


def test_targets_follow_their_histories():
    keys, targets, lengths = torch.arange(4.0)[:, None], torch.tensor([[10.0], [11.0], [12.0]]), torch.tensor([1, 0, 3])
    rows, places = append_targets(keys, targets, lengths)
    assert rows.squeeze(1).tolist() == [0, 10, 11, 1, 2, 3, 12] and places.tolist() == [1, 2, 6]


def test_hstu_equals_its_formula_sample_by_sample():
    model = in_float64(hstu(ClickInputs(Visits(), SGD(lr=0.1)), **SMALL))
    batch = visits(0, 30)
    expected = []
    for sample in range(30):
        one = batch.narrow(sample, sample + 1)
        vectors = model.sparse(one)
        keys = torch.cat([vectors["seen"], vectors["action"]], 1)
        target = torch.cat([vectors["item"], torch.zeros(1, 4, dtype=torch.float64)], 1)
        x = model.dense.project(torch.cat([keys, target]))
        for block in model.dense.blocks:
            x = block(x, torch.tensor([len(x)]))
        inputs = [one.dense, vectors["user"], vectors["item"], vectors["tags"], model.dense.norm(x[-1:])]
        expected.append(model.dense.head(torch.cat(inputs, 1)).squeeze(1))
    torch.testing.assert_close(model(batch), torch.cat(expected), rtol=0, atol=1e-10)


@pytest.mark.parametrize("has_histories", [True, False])
def test_hstu_is_described_on_the_meta_device(has_histories):
    model = hstu(ClickInputs(Visits(), SGD(lr=0.1)), **SMALL)
    batch = to_batch(Visits().take(np.arange(40) if has_histories else np.arange(0, 200, 5)))
    blocks = {block.name: block for block in sw.describe(model, batch).blocks}
    rows = int(batch.features.lengths[3].sum()) + 40
    products = 2 * rows * 6 * (24 + 6)
    assert blocks["dense.blocks.1"].forward_flops == products + rows * 2 * rows // 40 * 2 * 6


def test_errors_of_options():
    with pytest.raises(UserError, match="model.encoder.head_dim is 0; wanted 1 or more"):
        hstu(ClickInputs(Visits(), SGD(lr=0.1)), **SMALL | {"encoder": ENCODER | {"head_dim": 0}})
    with pytest.raises(UserError, match="model.encoder.heads is unknown"):
        hstu(ClickInputs(Visits(), SGD(lr=0.1)), **SMALL | {"encoder": ENCODER | {"heads": 1}})

    class Two:
        features, num_dense = (("item", 5, False), ("seen", 5, True), ("bought", 5, True)), 0
        histories = {"seen": "item", "bought": "item"}  # noqa: RUF012

    with pytest.raises(UserError, match="model.kind=hstu reads one history, and the data has seen, bought"):
        hstu(ClickInputs(Two(), SGD(lr=0.1)), **SMALL)


def test_a_run_on_movielens_and_its_export(tmp_path, monkeypatch):
    small = ("model.encoder.num_layers=2", "model.encoder.head_dim=4", "model.hidden=[8]")
    check_export(train_on_movielens(tmp_path, monkeypatch, "movielens-hstu", *small), tmp_path)
    assert config.recipe_values("movielens-hstu")["data"]["history"] == 50
