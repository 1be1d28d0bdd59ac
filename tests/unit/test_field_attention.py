"""Attention within short sequences compared with PyTorch's, for each instruction set."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from shardwright.errors import UserError
from shardwright.kernels import jagged_attention as padding
from shardwright.kernels import native_attention
from shardwright.kernels.field_attention import field_attention
from shardwright.kernels.jagged_attention import jagged_attention
from shardwright.layers.interaction import FieldAttention
from shardwright.library import native_library

LEVELS = st.sampled_from(["baseline", "avx2", "avx512", "best"])


def draw_normal(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def torchs_attention(packed, num_heads):
    query, key, value = (x.unflatten(2, (num_heads, -1)).transpose(1, 2) for x in packed.chunk(3, dim=2))
    return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def with_gradients(function, inputs, upstream):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    return [out, *torch.autograd.grad((out * upstream).sum(), inputs)]


class AtLevel:
    """A context with the kernels of an instruction set; `known` is false if this machine lacks it."""

    def __init__(self, name):
        self.native = native_library()
        self.before = self.native.shardwright_level()
        self.known = name == "best" or bool(self.native.shardwright_set_level(name.encode()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.native.shardwright_set_level(self.before)


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(0, 3),
    vectors=st.integers(1, 120),
    heads=st.integers(1, 3),
    width=st.sampled_from([16, 32, 7]),
    level=LEVELS,
    seed=st.integers(0, 9),
)
def test_field_attention_equals_torchs(samples, vectors, heads, width, level, seed):
    with AtLevel(level) as kernels:
        if not kernels.known:
            return
        packed = draw_normal(samples, vectors, 3 * heads * width, seed=seed)
        upstream = draw_normal(samples, vectors, heads * width, seed=seed + 100)
        expected = with_gradients(lambda x: torchs_attention(x, heads), [packed], upstream)
        actual = with_gradients(lambda x: field_attention(x, heads), [packed.float()], upstream.float())
        assert native_attention.supports(torch.empty(2, heads, width)) == (width != 7)
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=2e-5)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 120), max_size=4),
    heads=st.integers(1, 3),
    widths=st.sampled_from([(16, 16), (32, 16), (16, 48)]),
    distances=st.sampled_from([1, 5, 64, 300]),
    level=LEVELS,
)
def test_jagged_attention_equals_that_of_padded_sequences(lengths, heads, widths, distances, level):
    with AtLevel(level) as kernels:
        if not kernels.known:
            return
        num, (keys, values), lengths_B = sum(lengths), widths, torch.tensor(lengths, dtype=torch.int64)
        rows = draw_normal(num, 2 * heads, keys)
        inputs = [rows[:, :heads], rows[:, heads:], draw_normal(num, heads, values, seed=2)]
        inputs.append(draw_normal(distances, heads, seed=3))
        upstream = draw_normal(num, heads, values, seed=4)
        expected = with_gradients(lambda *x: jagged_attention(*x, lengths_B), inputs, upstream)
        actual = with_gradients(
            lambda *x: jagged_attention(*x, lengths_B), [x.float() for x in inputs], upstream.float()
        )
        assert expected[0].dtype == torch.float64 and actual[0].dtype == torch.float32
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=2e-5)


def test_views_of_one_tensor_are_read_in_place(monkeypatch):
    monkeypatch.setattr(padding, "_groups", None)  # the padded way is not taken
    rows, lengths = draw_normal(50, 4, 2, 16, dtype=torch.float32), torch.tensor([20, 0, 30])
    views, bias = [rows[:, i] for i in (2, 0, 3)], draw_normal(9, 2, dtype=torch.float32)
    actual = jagged_attention(*views, bias, lengths)
    assert torch.equal(actual, jagged_attention(*(x.contiguous() for x in views), bias, lengths))


@pytest.mark.parametrize("large", [1e30, float("inf"), float("nan")])
def test_scores_without_bounds(large):
    packed = draw_normal(2, 5, 48, dtype=torch.float32)
    packed[0, 1, 3] = large
    query, key, value = packed.chunk(3, dim=2)  # not SDPA: it answers 0 where a query is NaN
    actual, expected = field_attention(packed, 1), (query @ key.mT / 4).softmax(2) @ value
    torch.testing.assert_close(actual, expected, equal_nan=True)
    assert actual[1].isfinite().all()


def test_threads_and_other_samples_change_no_bit():
    packed, upstream = draw_normal(300, 27, 96, dtype=torch.float32), draw_normal(300, 27, 32, dtype=torch.float32)
    expected = with_gradients(lambda x: field_attention(x, 2), [packed], upstream)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            native_library().shardwright_use_threads(number)
            for first, second in zip(
                expected, with_gradients(lambda x: field_attention(x, 2), [packed], upstream), strict=True
            ):
                assert torch.equal(first, second)
    finally:
        native_library().shardwright_use_threads(threads)
    part = with_gradients(lambda x: field_attention(x, 2), [packed[100:107]], upstream[100:107])
    for whole, own in zip(expected, part, strict=True):
        assert torch.equal(whole[100:107], own)


def test_the_operator_passes_torchs_checks():
    packed = draw_normal(2, 5, 96, dtype=torch.float32)
    torch.library.opcheck(torch.ops.shardwright.field_attention, (packed.requires_grad_(), 2))
    compiled = torch.compile(FieldAttention(16, num_heads=2, head_dim=16), backend="eager", fullgraph=True)
    assert compiled(packed.detach()[..., :16]).shape == (2, 5, 32)


def test_without_kernels_it_is_torchs(monkeypatch):
    packed, upstream = draw_normal(2, 5, 96, dtype=torch.float32), draw_normal(2, 5, 32, dtype=torch.float32)
    operator = torch.ops.shardwright.field_attention
    expected = with_gradients(lambda x: operator(x, 2), [packed], upstream)
    monkeypatch.setattr(native_attention, "native_library", lambda: None)
    for actual in (operator, field_attention):
        results = with_gradients(partial(actual, num_heads=2), [packed], upstream)
        for mine, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_flops_are_those_of_its_products():
    packed = draw_normal(2, 5, 96, dtype=torch.float32).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        field_attention(packed, 2).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 2 * 2 * 5 * 5 * 16


def test_columns_that_are_no_queries_keys_and_values():
    with pytest.raises(UserError, match="50 columns of queries, keys and values"):
        field_attention(torch.zeros(2, 5, 50), 1)
    field_attention(torch.zeros(1, 5, 48), 1)
    with pytest.raises(UserError, match="gradients of attention"):
        torch.ops.shardwright.field_attention_gradients(torch.zeros(1, 5, 48), torch.zeros(1, 4, 16), 1)
