"""Adam with moments in bf16 compared to torch's Adam; the compiled step compared to the reference, bit for bit."""

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
OPTIMIZERS = (
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.2}),
    (torch.optim.Adam, {"lr": 0.01, "maximize": True, "foreach": True}),
)


def parameters(dtype=torch.float32, shapes=SHAPES) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw, dtype=dtype)) for shape in shapes]


def set_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    """Set the gradients of a step; a quarter of the parameters have none."""
    generator = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        parameter.grad = None if (step + index) % 4 == 3 else gradient


@pytest.mark.parametrize("make, kwargs", OPTIMIZERS)
def test_unrounded_moments_equal_torchs_adam(make, kwargs):
    for dtype in (torch.float64, torch.float32):
        params, torch_params = parameters(dtype), parameters(dtype)
        exact, reference = AdamBf16(make(params, **kwargs), dtype), make(torch_params, **kwargs)
        for step in range(30):
            for params_, optimizer in ((params, exact), (torch_params, reference)):
                set_gradients(params_, step)
                optimizer.step()
        far = 1e-12 if dtype == torch.float64 else 3e-6
        torch.testing.assert_close(params, torch_params, rtol=far, atol=far)
        state, expected = exact.state_dict(), reference.state_dict()
        assert state["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(state["state"], expected["state"], rtol=far, atol=far)


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.sampled_from((0, 1, 15, 16, 17, 100, 5_000)), min_size=1, max_size=5))
    kind = draw(st.sampled_from(adam_step.DTYPE_PAIRS))
    return sizes, kind, draw(st.integers(0, 1 << 40)), draw(st.integers(0, 2**62)), draw(st.booleans())


@pytest.mark.parametrize("level", ["best", "avx2", "baseline"])
@given(case=cases())
@settings(max_examples=30)
def test_the_compiled_step_equals_the_reference_bit_for_bit(level, case):
    native = library.native_library()
    best = native.shardwright_level()
    if level != "best" and not native.shardwright_set_level(level.encode()):
        pytest.skip(f"this machine has no {level}")
    sizes, (dtype, moment_dtype), offset, key, decay = case
    coefficients = AdamCoefficients(0.99, 0.1, 0.01, 0.02, 1.3, 1e-8, 0.1 * decay, 0.9, -1.0)

    def make_parameters() -> list[adam_step.AdamParameter]:
        generator, parameters, start = torch.Generator().manual_seed(offset % 1000), [], offset
        for size in sizes:
            x = torch.randn(4, size, generator=generator, dtype=dtype)
            mean, square = x[2].to(moment_dtype), (x[3] ** 2).to(moment_dtype)
            parameters.append(adam_step.AdamParameter(x[0].clone(), x[1].clone(), mean, square, 5, start, coefficients))
            start += size
        return parameters

    compiled, reference = make_parameters(), make_parameters()
    try:
        adam_step.fused_adam(compiled, key)
    finally:
        native.shardwright_set_level(best)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam_step, "native_library", lambda: None)
        adam_step.fused_adam(reference, key)
    for actual, expected in zip(compiled, reference, strict=True):
        for name in ("weight", "mean", "square"):
            atol = 1e-14 if dtype == torch.float64 else 0.0  # in float64 torch's root is not always correctly rounded
            torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=atol)


def test_threads_and_splitting_do_not_change_the_result():
    unsplit = parameters(shapes=((70_000,), (333,)))
    parts = [torch.nn.Parameter(part.detach().clone()) for x in unsplit for part in x.split(13_001)]
    ends = [0]
    for part_ in parts:
        ends.append(ends[-1] + part_.numel())
    optimizers = [
        AdamBf16(torch.optim.Adam(unsplit), torch.bfloat16),
        AdamBf16(torch.optim.Adam(parts), torch.bfloat16, lambda _: ends),
    ]
    num_threads_before = torch.get_num_threads()
    try:
        for step, num in enumerate((1, 2, 2, 1)):
            flat = torch.randn(70_333, generator=torch.Generator().manual_seed(step))
            for params, opt, count in ((unsplit, optimizers[0], num), (parts, optimizers[1], 1)):
                torch.set_num_threads(count)
                for x, gradient in zip(params, flat.split([x.numel() for x in params]), strict=True):
                    x.grad = gradient
                opt.step()
    finally:
        torch.set_num_threads(num_threads_before)
    assert torch.equal(torch.cat([x.detach() for x in unsplit]), torch.cat([x.detach() for x in parts]))
    for name in ("exp_avg", "exp_avg_sq"):
        pairs = zip(optimizers, (unsplit, parts), strict=True)
        moments = [torch.cat([opt.state[p][name] for p in params]) for opt, params in pairs]
        assert moments[0].dtype == torch.bfloat16 and torch.equal(*moments)


def test_rounding_is_unbiased_and_keeps_updates_that_rounding_to_nearest_loses():
    """A constant gradient g: after t steps the square is g*g * (1 - beta2**t). From t = 250 on it grows per step by
    less than half of the distance between neighbouring bf16 numbers."""
    steps, size = 1500, 4096
    params = [torch.nn.Parameter(torch.zeros(size))]
    optimizer = AdamBf16(torch.optim.Adam(params, lr=0.0), torch.bfloat16)
    params[0].grad = torch.full((size,), 0.7)
    nearest = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(steps):
        optimizer.step()
        nearest = (0.999 * nearest.float() + 0.001 * 0.49).bfloat16()
    square = optimizer.state[params[0]]["exp_avg_sq"].double()
    exact = 0.49 * (1 - 0.999**steps)
    assert abs(float(nearest) - exact) > 0.3 * exact
    deviation = float(square.std())
    assert 0 < deviation < 0.1 * exact
    assert abs(float(square.mean()) - exact) < 4 * deviation / size**0.5


def test_the_two_moments_are_rounded_by_independent_bits():
    """0.5 * (1 + 2**-8) is midway between two bf16 numbers: half of the values round up, independently of others."""
    size = 1 << 16
    middle = torch.full((size,), 0.5 * (1 + 2**-8))
    coefficients = AdamCoefficients(1.0, 0.0, 0.0, 0.0, 1.0, 1e-8, 0.0, 1.0, 1.0)
    rounded_up = []
    for key in (1, 2):
        mean, square = torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
        of_step = coefficients._replace(one_minus_beta1=1.0, beta2=0.0, one_minus_beta2=1.0 / float(middle[0]))
        adam_step.fused_adam(
            [adam_step.AdamParameter(torch.zeros(size), middle.clone(), mean, square, 1, 0, of_step)], key
        )
        rounded_up += [(mean.float() > middle).double(), (square.float() > middle).double()]
    tolerance = 5 * 0.5 / size**0.5
    for index, up in enumerate(rounded_up):
        assert abs(float(up.mean()) - 0.5) < tolerance
        for other in rounded_up[index + 1 :]:
            assert abs(float((up * other).mean()) - 0.25) < tolerance
        assert abs(float((up[1:] * up[:-1]).mean()) - 0.25) < tolerance


@pytest.mark.parametrize("first, second", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_a_state_is_loaded_and_trained_on(first, second):
    """A bf16 state is loaded bit for bit; torch's own float32 state is rounded to nearest."""
    params, resumed_params = parameters(), parameters()
    first_run = convert_state_dtype(torch.optim.Adam(params, lr=0.1), first)
    for step in range(5):
        set_gradients(params, step)
        first_run.step()
    resumed = convert_state_dtype(torch.optim.Adam(resumed_params, lr=0.1), second)
    resumed.load_state_dict(copy.deepcopy(first_run.state_dict()))
    assert resumed.state[resumed_params[0]]["exp_avg"].dtype == second
    assert torch.equal(resumed.state[resumed_params[0]]["exp_avg"], first_run.state[params[0]]["exp_avg"].to(second))
    with torch.no_grad():
        for target, source in zip(resumed_params, params, strict=True):
            target.copy_(source)
    for step in range(5, 9):
        for target, optimizer in ((params, first_run), (resumed_params, resumed)):
            set_gradients(target, step)
            optimizer.step()
    if first == second:
        assert all(torch.equal(target, source) for target, source in zip(resumed_params, params, strict=True))
    else:
        torch.testing.assert_close(resumed_params, params, rtol=0, atol=0.02)


def test_parameters_added_later_are_stepped():
    first, later = parameters(), parameters()
    optimizer = convert_state_dtype(torch.optim.Adam(first), torch.bfloat16)
    set_gradients(first, 1)
    optimizer.step()
    optimizer.add_param_group({"params": later})
    before = [parameter.detach().clone() for parameter in later]
    for parameter in (*first, *later):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(bool((now < then).all()) for now, then in zip(later, before, strict=True))


def test_unsupported_optimizers_and_parameters_are_refused():
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
    transposed = torch.nn.Parameter(torch.ones(3, 4).t())
    transposed.grad = torch.ones(4, 3)
    with pytest.raises(UserError, match=r"\(4, 3\) with strides \(1, 4\); wanted contiguous tensors"):
        convert_state_dtype(torch.optim.Adam([transposed]), torch.bfloat16).step()
    sgd = torch.optim.SGD(parameters())
    assert convert_state_dtype(sgd, torch.float32) is sgd
