"""Adam with moments in bf16 against torch's own, and the compiled step against the slow truth, bit for bit."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import library
from shardwright.dense.adam_bf16 import AdamBf16, convert_state_dtype
from shardwright.errors import UserError
from shardwright.kernels import adam_step
from shardwright.kernels.reference import AdamCoefficients

SHAPES = ((3, 7), (64,), (130, 129), (1,), (5, 0))
WAYS = (
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.2}),
    (torch.optim.Adam, {"lr": 0.01, "maximize": True, "foreach": True}),
)


def parameters(dtype=torch.float32, shapes=SHAPES) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw, dtype=dtype)) for shape in shapes]


def give(mine: list[torch.nn.Parameter], step: int) -> None:
    """Gradients of a step; some parameters have none in some."""
    draw = torch.Generator().manual_seed(step)
    for at, one in enumerate(mine):
        gradient = torch.randn(one.shape, generator=draw, dtype=torch.float64).to(one.dtype)
        one.grad = None if (step + at) % 4 == 3 else gradient


@pytest.mark.parametrize("make, how", WAYS)
def test_exact_moments_are_torchs_adam(make, how):
    for dtype in (torch.float64, torch.float32):
        mine, theirs = parameters(dtype), parameters(dtype)
        ours, plain = AdamBf16(make(mine, **how), dtype), make(theirs, **how)
        for step in range(30):
            for one, optimizer in ((mine, ours), (theirs, plain)):
                give(one, step)
                optimizer.step()
        far = 1e-12 if dtype == torch.float64 else 3e-6
        torch.testing.assert_close(mine, theirs, rtol=far, atol=far)
        kept, wanted = ours.state_dict(), plain.state_dict()
        assert kept["param_groups"] == wanted["param_groups"]
        torch.testing.assert_close(kept["state"], wanted["state"], rtol=far, atol=far)


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.sampled_from((0, 1, 15, 16, 17, 100, 5_000)), min_size=1, max_size=5))
    kind = draw(st.sampled_from(adam_step.DTYPE_PAIRS))
    return sizes, kind, draw(st.integers(0, 1 << 40)), draw(st.integers(0, 2**62)), draw(st.booleans())


@pytest.mark.parametrize("level", ["best", "avx2", "baseline"])
@given(case=cases())
@settings(max_examples=30)
def test_the_compiled_step_is_the_reference_to_the_bit(level, case):
    native = library.native_library()
    best = native.shardwright_level()
    if level != "best" and not native.shardwright_set_level(level.encode()):
        pytest.skip(f"this machine has no {level}")
    sizes, (dtype, kept), place, key, decayed = case
    numbers = AdamCoefficients(0.99, 0.1, 0.01, 0.02, 1.3, 1e-8, 0.1 * decayed, 0.9, -1.0)

    def made() -> list[adam_step.AdamParameter]:
        draw, found, at = torch.Generator().manual_seed(place % 1000), [], place
        for size in sizes:
            x = torch.randn(4, size, generator=draw, dtype=dtype)
            mean, square = x[2].to(kept), (x[3] ** 2).to(kept)
            found.append(adam_step.AdamParameter(x[0].clone(), x[1].clone(), mean, square, 5, at, numbers))
            at += size
        return found

    ours, slow = made(), made()
    try:
        adam_step.fused_adam(ours, key)
    finally:
        native.shardwright_set_level(best)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam_step, "native_library", lambda: None)
        adam_step.fused_adam(slow, key)
    for one, other in zip(ours, slow, strict=True):
        for name in ("weight", "mean", "square"):
            far = 1e-14 if dtype == torch.float64 else 0.0  # where torch's own root is not always the nearest number
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=far)


def test_threads_and_pieces_change_nothing():
    whole = parameters(shapes=((70_000,), (333,)))
    pieces = [torch.nn.Parameter(part.detach().clone()) for one in whole for part in one.split(13_001)]
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + piece.numel())
    optimizers = [
        AdamBf16(torch.optim.Adam(whole), torch.bfloat16),
        AdamBf16(torch.optim.Adam(pieces), torch.bfloat16, lambda _: ends),
    ]
    threads = torch.get_num_threads()
    try:
        for step, num in enumerate((1, 2, 2, 1)):
            flat = torch.randn(70_333, generator=torch.Generator().manual_seed(step))
            for mine, optimizer, count in ((whole, optimizers[0], num), (pieces, optimizers[1], 1)):
                torch.set_num_threads(count)
                for one, gradient in zip(mine, flat.split([one.numel() for one in mine]), strict=True):
                    one.grad = gradient
                optimizer.step()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat([one.detach() for one in whole]), torch.cat([one.detach() for one in pieces]))
    for name in ("exp_avg", "exp_avg_sq"):
        both = [
            torch.cat([o.state[p][name] for p in mine]) for o, mine in zip(optimizers, (whole, pieces), strict=True)
        ]
        assert both[0].dtype == torch.bfloat16 and torch.equal(*both)


def test_rounding_is_unbiased_and_follows_what_the_nearest_would_lose():
    """A constant gradient g: after t steps the square is g*g * (1 - beta2**t), which grows by less than half of what
    lies between two numbers of bf16 from t = 250 on."""
    steps, size = 1500, 4096
    mine = [torch.nn.Parameter(torch.zeros(size))]
    ours = AdamBf16(torch.optim.Adam(mine, lr=0.0), torch.bfloat16)
    mine[0].grad = torch.full((size,), 0.7)
    nearest = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(steps):
        ours.step()
        nearest = (0.999 * nearest.float() + 0.001 * 0.49).bfloat16()
    square = ours.state[mine[0]]["exp_avg_sq"].double()
    exact = 0.49 * (1 - 0.999**steps)
    assert abs(float(nearest) - exact) > 0.3 * exact
    deviation = float(square.std())
    assert 0 < deviation < 0.1 * exact
    assert abs(float(square.mean()) - exact) < 4 * deviation / size**0.5


def test_the_two_moments_are_rounded_by_bits_of_their_own():
    """0.5 * (1 + 2**-8) lies in the middle of two numbers of bf16: half of it goes up, whatever else does."""
    size = 1 << 16
    middle = torch.full((size,), 0.5 * (1 + 2**-8))
    numbers = AdamCoefficients(1.0, 0.0, 0.0, 0.0, 1.0, 1e-8, 0.0, 1.0, 1.0)
    ups = []
    for key in (1, 2):
        mean, square = torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
        taken = numbers._replace(one_minus_beta1=1.0, beta2=0.0, one_minus_beta2=1.0 / float(middle[0]))
        adam_step.fused_adam(
            [adam_step.AdamParameter(torch.zeros(size), middle.clone(), mean, square, 1, 0, taken)], key
        )
        ups += [(mean.float() > middle).double(), (square.float() > middle).double()]
    tolerance = 5 * 0.5 / size**0.5
    for at, one in enumerate(ups):
        assert abs(float(one.mean()) - 0.5) < tolerance
        for other in ups[at + 1 :]:
            assert abs(float((one * other).mean()) - 0.25) < tolerance
        assert abs(float((one[1:] * one[:-1]).mean()) - 0.25) < tolerance


@pytest.mark.parametrize("first, then", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_a_state_is_taken_over(first, then):
    """From bf16 to the bit; from torch's own rounded to the nearest, and trained on."""
    mine, theirs = parameters(), parameters()
    before = convert_state_dtype(torch.optim.Adam(mine, lr=0.1), first)
    for step in range(5):
        give(mine, step)
        before.step()
    after = convert_state_dtype(torch.optim.Adam(theirs, lr=0.1), then)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert after.state[theirs[0]]["exp_avg"].dtype == then
    assert torch.equal(after.state[theirs[0]]["exp_avg"], before.state[mine[0]]["exp_avg"].to(then))
    with torch.no_grad():
        for one, other in zip(theirs, mine, strict=True):
            one.copy_(other)
    for step in range(5, 9):
        for one, optimizer in ((mine, before), (theirs, after)):
            give(one, step)
            optimizer.step()
    if first == then:
        assert all(torch.equal(one, other) for one, other in zip(theirs, mine, strict=True))
    else:
        torch.testing.assert_close(theirs, mine, rtol=0, atol=0.02)


def test_parameters_that_are_added_later_are_stepped():
    first, later = parameters(), parameters()
    ours = convert_state_dtype(torch.optim.Adam(first), torch.bfloat16)
    give(first, 1)
    ours.step()
    ours.add_param_group({"params": later})
    before = [one.detach().clone() for one in later]
    for one in (*first, *later):
        one.grad = torch.ones_like(one)
    ours.step()
    assert all(bool((now < then).all()) for now, then in zip(later, before, strict=True))


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(UserError, match='Adam and AdamW support, not SGD: use one of them, or drop "optimizer.bf16"'):
        convert_state_dtype(torch.optim.SGD(parameters()), torch.bfloat16)
    with pytest.raises(UserError, match=r"Adam\(amsgrad=True\)"):
        convert_state_dtype(torch.optim.Adam(parameters(), amsgrad=True), torch.bfloat16)
    with pytest.raises(UserError, match=r"a parameter of shape \(3, 7\) is torch.float64"):
        convert_state_dtype(torch.optim.AdamW(parameters(torch.float64)), torch.bfloat16)
    hooked = torch.optim.Adam(parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UserError, match="hooks, and they would be lost"):
        convert_state_dtype(hooked, torch.bfloat16)
    turned = torch.nn.Parameter(torch.ones(3, 4).t())
    turned.grad = torch.ones(4, 3)
    with pytest.raises(UserError, match=r"\(4, 3\) with strides \(1, 4\); wanted contiguous tensors"):
        convert_state_dtype(torch.optim.Adam([turned]), torch.bfloat16).step()
    plain = torch.optim.SGD(parameters())
    assert convert_state_dtype(plain, torch.float32) is plain
