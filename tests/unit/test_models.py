"""Models against plain formulas."""

import pytest
import torch
from clicks import FEATURES, batch, dlrm, tables
from torch.nn import functional

from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.layers.attention import Attention
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import DotInteraction
from shardwright.layers.loss import BinaryLoss
from shardwright.models.ctr import LogisticRegression
from shardwright.models.dlrm import DLRM
from shardwright.models.gpt import GPT


def tokens(batch_size: int = 3, length: int = 8) -> Batch:
    ids = torch.randint(0, 20, (batch_size, length + 1))
    jagged = Jagged(("tokens",), ids[:, :-1].flatten(), torch.full((1, batch_size), length))
    return Batch(jagged, None, {"next": ids[:, 1:]})


def test_dot_interaction_is_every_pair_once():
    x = torch.randn(3, 4, 5)
    expected = [(x[:, i] * x[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
    torch.testing.assert_close(DotInteraction(4)(x), torch.stack(expected, 1))


def test_dlrm_is_bottom_dots_top():
    model, one = dlrm(), batch()
    vectors = model.sparse(one)
    dense = model.dense.bottom(one.dense)
    four = [dense, *(vectors[feature.name] for feature in FEATURES)]
    dots = [(four[i] * four[j]).sum(1, keepdim=True) for i in range(4) for j in range(i + 1, 4)]
    expected = model.dense.top(torch.cat([dense, *dots], 1)).squeeze(1)
    torch.testing.assert_close(model(one), expected)


def test_logistic_regression_adds_weights():
    model, one = LogisticRegression(EmbeddingBags(tables(dim=1), FEATURES), 4), batch()
    vectors = model.sparse(one)
    expected = one.dense @ model.dense.linear.weight[0] + model.dense.linear.bias
    expected = expected + sum(vectors[feature.name][:, 0] for feature in FEATURES)
    torch.testing.assert_close(model(one), expected)


def test_attention_equals_its_formula():
    attention, x = Attention(12, 3).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    query, key, value = attention.qkv(x).chunk(3, dim=2)
    heads = []
    for head in range(3):
        q, k, v = (part[:, :, 4 * head : 4 * head + 4] for part in (query, key, value))
        scores = q @ k.transpose(1, 2) / 2.0
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
        heads.append(scores.softmax(2) @ v)
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, 2)), rtol=0, atol=1e-12)


def test_gpt_is_causal_and_ties_its_head():
    model = GPT(vocabulary=20, context=8, channels=16, num_blocks=2, num_heads=2)
    assert model.head.linear.weight is model.embed.token.weight
    one = tokens()
    changed = one.features.values.view(3, 8).clone()
    changed[:, 5] = (changed[:, 5] + 1) % 20
    other = Batch(Jagged(("tokens",), changed.flatten(), one.features.lengths), None, one.labels)
    before, after = model(one), model(other)
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])


def test_binary_loss_weighs_samples():
    one = batch()
    logits = torch.randn(16)
    weighted = Batch(one.features, one.dense, one.labels, torch.rand(16))
    each = functional.binary_cross_entropy_with_logits(logits, one.labels["click"], reduction="none")
    torch.testing.assert_close(BinaryLoss()(logits, weighted), (each * weighted.weights).sum() / weighted.weights.sum())


def test_label_of_two_is_named():
    one = batch()
    one.labels["click"][5] = 2
    with pytest.raises(UserError, match='label "click": sample 5 is 2; a label is 0 or 1'):
        BinaryLoss()(torch.zeros(16), one)


def test_shapes_that_do_not_meet_are_named():
    bags = EmbeddingBags(tables(), FEATURES)
    with pytest.raises(UserError, match=r"bottom MLP ends at 4 and the tables have dims \[8\]"):
        DLRM(bags, 4, bottom=(4,), top=(4,))
    with pytest.raises(UserError, match="tables of dim 1"):
        LogisticRegression(bags, 4)
    with pytest.raises(UserError, match="sequences of 8 tokens; this model reads 4"):
        GPT(vocabulary=20, context=4, channels=4, num_blocks=1, num_heads=1)(tokens())
