"""Malformed calls of the embedding operators and id kernels: a UserError, or what the reference gives, and no crash."""

from copy import deepcopy
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_embedding_kernels import DIMS, OPTIMIZERS, close, reference, some_ids, some_tables  # noqa: F401
from test_ids import reference as plain_ids  # noqa: F401
from torch import Tensor

from shardwright.errors import UserError
from shardwright.kernels import dedup as id_kernels
from shardwright.kernels import embedding
from shardwright.kernels.arguments import POOLINGS, Ids, empty_vectors
from shardwright.spec.optimizer import hyperparameters

IDS = ("values", "offsets", "id_weights", "tables", "pooling")
OPERATORS = {
    "lookup": ("weights", *IDS),
    "update": ("weights", "state", "gradients", "ordered", *IDS, "kind", "numbers", "steps"),
    "weight_gradients": ("weights", "gradients", "values", "offsets", "tables", "pooling"),
}
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.bool),
    torch.complex64,
)
NUMBERS = (-1, 0, 1, 2, 3, 9, 2**31, 2**40, 2**62, -(2**63))


def poked(tensor: Tensor, at: int, number: int) -> Tensor:
    found = tensor.clone()
    found.view(-1)[at] = number % 10 if tensor.is_floating_point() else number
    return found


# What may be wrong with a tensor. Many of these are right: they say the same in another layout.
TENSORS = {
    "dtype": lambda t, draw: t.real.to(draw.choice(DTYPES)),
    "strided": lambda t, draw: t.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda t, draw: t.t().contiguous().t(),
    "turned": lambda t, draw: t.t(),
    "spread": lambda t, draw: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded": lambda t, draw: t[:1].expand(t.shape),
    "narrow": lambda t, draw: t[..., :1].expand(t.shape),
    "shorter": lambda t, draw: t[:-1],
    "longer": lambda t, draw: torch.cat([t, t[-1:]]),
    "slimmer": lambda t, draw: t[..., :-1],
    "wider": lambda t, draw: torch.cat([t, t[..., :1]], -1),
    "deeper": lambda t, draw: t.unsqueeze(draw.choice((0, -1))),
    "flat": lambda t, draw: t.flatten(),
    "one": lambda t, draw: t.flatten()[0],
    "none": lambda t, draw: t[:0],
    "no columns": lambda t, draw: t[..., :0],
    "nowhere": lambda t, draw: t.to("meta"),
    "sparse": lambda t, draw: t.to_sparse(),
    "poked": lambda t, draw: poked(t, draw.randrange(t.numel()), draw.choice(NUMBERS)),
    "reversed": lambda t, draw: t.flip(0),
}
LISTS = {
    "shorter": lambda x, draw: x[:-1],
    "longer": lambda x, draw: [*x, deepcopy(draw.choice(x))],
    "none": lambda x, draw: [],
    "turned": lambda x, draw: x[::-1],
    "other": lambda x, draw: [draw.choice(NUMBERS), *x[1:]] if isinstance(x[0], int) else [x[0][:-1], *x[1:]],
}


def a_call(draw: Random) -> dict:
    """Arguments that are right, by name; of every operator."""
    shapes = [(draw.randint(1, 9), draw.choice(DIMS[:6])) for _ in range(draw.randint(1, 3))]
    features = [(draw.randrange(len(shapes)), draw.choice(POOLINGS)) for _ in range(draw.randint(1, 4))]
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    optimizer = draw.choice(OPTIMIZERS)
    tables = some_tables(generator, shapes, draw.choice((torch.float64, torch.float32, torch.bfloat16)), optimizer)
    ids = some_ids(
        generator,
        features,
        [rows for rows, _ in shapes],
        batch=draw.choice((0, 1, 3, 3, 3)),
        wide=draw.random() < 0.5,
        weighted=draw.choice((None, torch.float32)),
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
        "kind": optimizer.kind,
        "numbers": list(hyperparameters(optimizer).values()),
        "steps": [number for table in tables for number in (table.step, table.rounding_key, 1)],
    }


def spoil(call: dict, names: tuple[str, ...], draw: Random) -> None:
    """One argument becomes another; what cannot be done to it leaves it as it is."""
    name = draw.choice(names)
    found = call[name]
    try:
        if isinstance(found, list) and found and isinstance(found[0], Tensor) and draw.random() < 0.7:
            at = draw.randrange(len(found))
            found[at] = draw.choice(list(TENSORS.values()))(found[at], draw)
        elif isinstance(found, list):
            call[name] = draw.choice(list(LISTS.values()))(found, draw)
        elif isinstance(found, Tensor):
            call[name] = draw.choice(list(TENSORS.values()))(found, draw)
        elif isinstance(found, str):
            call[name] = draw.choice((*embedding.OPTIMIZER_KINDS, "adagard"))
    except (RuntimeError, IndexError, ValueError, TypeError):
        pass


def result(operator: str, call: dict) -> list[Tensor] | None:
    """What an operator gives and what it leaves behind; None where it refuses."""
    try:
        given_ = getattr(torch.ops.shardwright, f"embedding_{operator}")(*(call[name] for name in OPERATORS[operator]))
    except UserError:
        return None
    written = call["weights"] + call["state"] if operator == "update" else []
    return [*([given_] if isinstance(given_, Tensor) else given_ or []), *written]


@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=300)
@given(seed=st.integers(0, 2**31), spoils=st.integers(0, 2))
def test_operators(reference, operator, seed, spoils):  # noqa: F811
    embedding._operators()
    draw = Random(seed)
    call = a_call(draw)
    for _ in range(spoils):
        spoil(call, OPERATORS[operator], draw)
    twin, before = deepcopy(call), deepcopy(call)
    mine = result(operator, call)
    reference(True)
    theirs = result(operator, twin)
    reference(False)
    assert (mine is None) == (theirs is None) and (spoils or mine is not None)
    if mine is None:
        for one, other in zip(call["weights"] + call["state"], before["weights"] + before["state"], strict=True):
            assert one.device.type == "meta" or torch.equal(one.to_dense(), other.to_dense())
        return
    for one, other in zip(mine, theirs, strict=True):
        close(one, other, one.dtype, scale=10.0)


def moved(kernel: str, call: dict) -> tuple | None:
    """What an id kernel gives; None where it refuses."""
    ids = Ids(*(call[name] for name in IDS))
    calls = {
        "distinct": lambda: id_kernels.unique_rows(ids, call["rows"]),
        "bucketized": lambda: id_kernels.bucketize_ids(ids, call["starts"]),
        "permuted": lambda: id_kernels.permute_segments(call["values"], call["lengths"], call["order"]),
    }
    try:
        return calls[kernel]()
    except UserError:
        return None


@pytest.mark.parametrize("kernel, more", [("distinct", "rows"), ("bucketized", "starts"), ("permuted", "lengths")])
@settings(max_examples=200)
@given(seed=st.integers(0, 2**31), spoils=st.integers(0, 2))
def test_id_kernels(plain_ids, kernel, more, seed, spoils):  # noqa: F811
    draw = Random(seed)
    call = a_call(draw)
    rows = [weight.shape[0] for weight in call["weights"]]
    cuts = draw.randint(0, 3)
    call |= {
        "rows": rows,
        "starts": [
            [0, *sorted(draw.randint(0, rows[table]) for _ in range(cuts)), rows[table]] for table in call["tables"]
        ],
        "lengths": call["offsets"]
        .diff()
        .view(len(call["tables"]), (call["offsets"].numel() - 1) // len(call["tables"])),
        "order": [draw.randrange(len(call["tables"])) for _ in range(draw.randint(0, 5))],
    }
    names = (*IDS, more) if kernel != "permuted" else ("values", "lengths", "order")
    for _ in range(spoils):
        spoil(call, names, draw)
    plain_ids(True)
    theirs = moved(kernel, call)
    plain_ids(False)
    mine = moved(kernel, call)
    assert (mine is None) == (theirs is None) and (spoils or mine is not None)
    for one, other in zip(mine or (), theirs or (), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
