"""Malformed calls of embedding operators and id kernels: a UserError, or the result of the reference, never a crash."""

from copy import deepcopy
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dedup import reference as plain_ids  # noqa: F401
from test_embedding_kernels import DIMS, OPTIMIZERS, assert_close, make_ids, make_tables, use_reference  # noqa: F401
from torch import Tensor

from shardwright.errors import UserError
from shardwright.kernels import dedup as id_kernels
from shardwright.kernels import embedding
from shardwright.kernels.arguments import POOLINGS, Ids, empty_vectors
from shardwright.spec.optimizer import hyperparameters

ID_KERNELS = (("unique_rows", "rows"), ("bucketize_ids", "starts"), ("permute_segments", "lengths"))
IDS = ("values", "offsets", "id_weights", "tables", "pooling")
OPERATORS = {
    "lookup": ("weights", *IDS),
    "update": ("weights", "state", "gradients", "ordered", *IDS, "bounds", "kind", "numbers", "steps", "row_numbers"),
    "weight_gradients": ("weights", "gradients", "values", "offsets", "tables", "pooling"),
}
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.bool),
    torch.complex64,
)
BAD_NUMBERS = (-1, 0, 1, 2, 3, 9, 2**31, 2**40, 2**62, -(2**63))


def with_number(tensor: Tensor, index: int, number: int) -> Tensor:
    result = tensor.clone()
    result.view(-1)[index] = number % 10 if tensor.is_floating_point() else number
    return result


# Changes to a tensor argument. Many keep it valid: they give the same values in another layout.
TENSOR_CHANGES = {
    "dtype": lambda t, draw: t.real.to(draw.choice(DTYPES)),
    "strided": lambda t, draw: t.repeat_interleave(2, -1)[..., ::2],
    "column major": lambda t, draw: t.t().contiguous().t(),
    "transposed shape": lambda t, draw: t.t(),
    "row stride": lambda t, draw: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded": lambda t, draw: t[:1].expand(t.shape),
    "narrow": lambda t, draw: t[..., :1].expand(t.shape),
    "shorter": lambda t, draw: t[:-1],
    "longer": lambda t, draw: torch.cat([t, t[-1:]]),
    "slimmer": lambda t, draw: t[..., :-1],
    "wider": lambda t, draw: torch.cat([t, t[..., :1]], -1),
    "deeper": lambda t, draw: t.unsqueeze(draw.choice((0, -1))),
    "flat": lambda t, draw: t.flatten(),
    "single value": lambda t, draw: t.flatten()[0],
    "empty": lambda t, draw: t[:0],
    "no columns": lambda t, draw: t[..., :0],
    "meta": lambda t, draw: t.to("meta"),
    "sparse": lambda t, draw: t.to_sparse(),
    "bad number": lambda t, draw: with_number(t, draw.randrange(t.numel()), draw.choice(BAD_NUMBERS)),
    "reversed": lambda t, draw: t.flip(0),
}
LIST_CHANGES = {
    "shorter": lambda x, draw: x[:-1],
    "longer": lambda x, draw: [*x, deepcopy(draw.choice(x))],
    "empty": lambda x, draw: [],
    "reversed": lambda x, draw: x[::-1],
    "other": lambda x, draw: [draw.choice(BAD_NUMBERS), *x[1:]] if isinstance(x[0], int) else [x[0][:-1], *x[1:]],
}


def draw_call(random: Random) -> dict:
    """Valid arguments of all operators, by name."""
    shapes = [(random.randint(1, 9), random.choice(DIMS[:6])) for _ in range(random.randint(1, 3))]
    features = [(random.randrange(len(shapes)), random.choice(POOLINGS)) for _ in range(random.randint(1, 4))]
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    optimizer = random.choice(OPTIMIZERS)
    tables = make_tables(generator, shapes, random.choice((torch.float64, torch.float32, torch.bfloat16)), optimizer)
    ids = make_ids(
        generator,
        features,
        [rows for rows, _ in shapes],
        batch=random.choice((0, 1, 3, 3, 3)),
        wide=random.random() < 0.5,
        weighted=random.choice((None, torch.float32)),
    )
    weights = [table.weight for table in tables]
    return {
        "weights": weights,
        "state": [state for table in tables for state in table.state],
        "gradients": [torch.rand(v.shape, generator=generator).to(v.dtype) for v in empty_vectors(weights, ids)],
        "ordered": [],
        "values": ids.values,
        "offsets": ids.offsets,
        "id_weights": ids.weights,
        "tables": list(ids.tables),
        "pooling": list(ids.pooling),
        "bounds": random.choice(([], [shapes[table][0] for table in ids.tables])),
        "kind": optimizer.kind,
        "numbers": list(hyperparameters(optimizer).values()),
        "steps": [number for table in tables for number in (table.step, table.rounding_key, 1)],
        "row_numbers": [random.choice((None, torch.randperm(rows, generator=generator))) for rows, _ in shapes],
    }


def change_argument(call: dict, names: tuple[str, ...], random: Random) -> None:
    """Change one argument at random, in place; if the change is not possible the argument stays as it is."""
    name = random.choice(names)
    argument = call[name]
    try:
        tensors = [i for i, x in enumerate(argument) if isinstance(x, Tensor)] if isinstance(argument, list) else []
        if tensors and random.random() < 0.7:
            index = random.choice(tensors)
            argument[index] = random.choice(list(TENSOR_CHANGES.values()))(argument[index], random)
        elif isinstance(argument, list):
            call[name] = random.choice(list(LIST_CHANGES.values()))(argument, random)
        elif isinstance(argument, Tensor):
            call[name] = random.choice(list(TENSOR_CHANGES.values()))(argument, random)
        elif isinstance(argument, str):
            call[name] = random.choice((*embedding.OPTIMIZER_KINDS, "adagard"))
    except (RuntimeError, IndexError, ValueError, TypeError):
        pass


def run_operator(operator: str, call: dict) -> list[Tensor] | None:
    """The outputs of an operator and the tensors it updates; None if it raises a UserError."""
    try:
        output = getattr(torch.ops.shardwright, f"embedding_{operator}")(*(call[name] for name in OPERATORS[operator]))
    except UserError:
        return None
    updated = call["weights"] + call["state"] if operator == "update" else []
    return [*([output] if isinstance(output, Tensor) else output or []), *updated]


@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=300)
@given(seed=st.integers(0, 2**31), changes=st.integers(0, 2))
def test_operators_with_changed_arguments_match_the_reference(use_reference, operator, seed, changes):  # noqa: F811
    embedding._operators()
    random = Random(seed)
    call = draw_call(random)
    for _ in range(changes):
        change_argument(call, OPERATORS[operator], random)
    reference_call, before = deepcopy(call), deepcopy(call)
    results = run_operator(operator, call)
    use_reference(True)
    expected = run_operator(operator, reference_call)
    use_reference(False)
    assert (results is None) == (expected is None) and (changes or results is not None)
    if results is None:
        for actual, ref in zip(call["weights"] + call["state"], before["weights"] + before["state"], strict=True):
            assert actual.device.type == "meta" or torch.equal(actual.to_dense(), ref.to_dense())
        return
    for actual, ref in zip(results, expected, strict=True):
        assert_close(actual, ref, actual.dtype, scale=10.0)


def run_id_kernel(kernel: str, call: dict) -> tuple | None:
    """The outputs of an id kernel; None if it raises a UserError."""
    ids = Ids(*(call[name] for name in IDS))
    calls = {
        "unique_rows": lambda: id_kernels.unique_rows(ids, call["rows"]),
        "bucketize_ids": lambda: id_kernels.bucketize_ids(ids, call["starts"]),
        "permute_segments": lambda: id_kernels.permute_segments(call["values"], call["lengths"], call["order"]),
    }
    try:
        return calls[kernel]()
    except UserError:
        return None


@pytest.mark.parametrize("kernel, argument", ID_KERNELS)
@settings(max_examples=200)
@given(seed=st.integers(0, 2**31), changes=st.integers(0, 2))
def test_id_kernels_with_changed_arguments_match_the_reference(plain_ids, kernel, argument, seed, changes):  # noqa: F811
    random = Random(seed)
    call = draw_call(random)
    rows = [weight.shape[0] for weight in call["weights"]]
    cuts = random.randint(0, 3)
    call |= {
        "rows": rows,
        "starts": [
            [0, *sorted(random.randint(0, rows[table]) for _ in range(cuts)), rows[table]] for table in call["tables"]
        ],
        "lengths": call["offsets"]
        .diff()
        .view(len(call["tables"]), (call["offsets"].numel() - 1) // len(call["tables"])),
        "order": [random.randrange(len(call["tables"])) for _ in range(random.randint(0, 5))],
    }
    names = (*IDS, argument) if kernel != "permute_segments" else ("values", "lengths", "order")
    for _ in range(changes):
        change_argument(call, names, random)
    plain_ids(True)
    expected = run_id_kernel(kernel, call)
    plain_ids(False)
    results = run_id_kernel(kernel, call)
    assert (results is None) == (expected is None) and (changes or results is not None)
    for actual, ref in zip(results or (), expected or (), strict=True):
        assert torch.equal(actual, ref) if isinstance(actual, Tensor) else actual == ref
