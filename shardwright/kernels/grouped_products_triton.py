"""Products of rows with their groups' weights, and of rows with rows, on GPUs: kernels/grouped_products.py in Triton.

A number of a result is a sum over blocks of channels (or rows) in order, with a block size that depends only on the
dtype: a row's result, to the bit, does not depend on the rows beside it. One launch computes all groups; their sizes
stay on the GPU, so that the CPU does not wait for them.

Shape legend: R rows, ordered by group; G groups; K summed channels; N channels of the result; H, C: see
kernels/grouped_products.py.
"""

from functools import cache
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shardwright.kernels.cuda_copies import to_device

ALIGNMENT = 16  # bytes; of each row, for the hardware that copies tiles
BAND = 8  # row tiles whose columns are computed together, so that weights stay in the cache
SUMMED = MappingProxyType({torch.bfloat16: 64, torch.float16: 64, torch.float32: 32})  # channels of a block
# Tiles that were fastest on an H200: so small that a processor has two at a time, one of which is computed while the
# other begins or ends.
TILE, SUMMED_ROWS = 128, 32


def is_supported(*factors: Tensor) -> bool:
    """Whether the kernels can multiply these, on a GPU with compute capability 9.0 or later."""
    dtype = factors[0].dtype
    return (
        dtype in SUMMED
        and all(x.dtype is dtype and x.shape[-1] * x.element_size() % ALIGNMENT == 0 for x in factors)
        and all(x.numel() for x in factors)
        and _capability(factors[0].device) >= (9, 0)
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
def find_tiles_kernel(sizes, tiles, groups, num_groups, BLOCK_R: tl.constexpr, GROUPS: tl.constexpr):
    """For one group: its tiles, and its place among all groups by size."""
    group = tl.program_id(0)
    index = tl.arange(0, GROUPS)
    size_of = tl.load(sizes + index, mask=index < num_groups, other=0).to(tl.int32)
    tiles_of = (size_of + BLOCK_R - 1) // BLOCK_R
    size = tl.sum(tl.where(index == group, size_of, 0))
    start = tl.sum(tl.where(index < group, size_of, 0))
    first = 1 + tl.sum(tl.where(index < group, tiles_of, 0))
    count = (size + BLOCK_R - 1) // BLOCK_R
    for i in range(0, count):
        tile = tiles + 3 * (first + i)
        tl.store(tile, group)
        tl.store(tile + 1, start + i * BLOCK_R)
        tl.store(tile + 2, min(start + (i + 1) * BLOCK_R, start + size))
    if group == 0:
        tl.store(tiles, tl.sum(tiles_of))
    is_before = (size_of > size) | ((size_of == size) & (index < group))
    place = groups + 3 * tl.sum((is_before & (index < num_groups)).to(tl.int32))
    tl.store(place, group)
    tl.store(place + 1, start)
    tl.store(place + 2, start + size)


@triton.jit
def rows_times_weights_kernel(
    rows,
    weight,
    out,
    tiles,
    N,
    K,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    """Compute tiles of `out`; `tiles` as `find_tiles` returns them."""
    num_row_tiles = tl.load(tiles)
    tiles += 3
    num_columns = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_row_tiles * num_columns, tl.num_programs(0), flatten=True):
        band = tile // (BAND * num_columns)
        height = min(num_row_tiles - band * BAND, BAND)
        row_tile = band * BAND + tile % (BAND * num_columns) % height
        column = tile % (BAND * num_columns) // height * BLOCK_N
        group = tl.load(tiles + 3 * row_tile)
        start = tl.load(tiles + 3 * row_tile + 1)
        end = tl.load(tiles + 3 * row_tile + 2)
        total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            left = rows.load([start, k])
            if TRANSPOSED:
                right = weight.load([group, column, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                right = weight.load([group, k, column]).reshape(BLOCK_K, BLOCK_N)
            total = tl.dot(left, right, total, input_precision=PRECISION)
        row = start + tl.arange(0, BLOCK_R)
        columns = column + tl.arange(0, BLOCK_N)
        cells = out + row.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(cells, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (columns < N)[None, :])


@triton.jit
def rows_times_rows_kernel(
    left,
    right,
    left_pointer,
    right_pointer,
    out,
    groups,
    H,
    C,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A tile of a group's sum of left x right; each of `groups` has a group's number, first row and end."""
    num_high, num_wide = tl.cdiv(H, BLOCK_H), tl.cdiv(C, BLOCK_C)
    position = tl.program_id(0) // (num_high * num_wide)
    tile = tl.program_id(0) % (num_high * num_wide)
    group = tl.load(groups + 3 * position)
    start = tl.load(groups + 3 * position + 1)
    end = tl.load(groups + 3 * position + 2)
    h, c = tile // num_wide * BLOCK_H, tile % num_wide * BLOCK_C
    whole = start + (end - start) // BLOCK_R * BLOCK_R
    total = tl.zeros((BLOCK_H, BLOCK_C), tl.float32)
    for row in range(start, whole, BLOCK_R):
        total = tl.dot(left.load([row, h]).T, right.load([row, c]), total, input_precision=PRECISION)
    hs, cs = h + tl.arange(0, BLOCK_H), c + tl.arange(0, BLOCK_C)
    if whole < end:
        rest = whole + tl.arange(0, BLOCK_R)
        has = (rest < end)[:, None]
        rest = rest.to(tl.int64)[:, None]
        high = tl.load(left_pointer + rest * H + hs[None, :], mask=has & (hs < H)[None, :], other=0.0)
        wide = tl.load(right_pointer + rest * C + cs[None, :], mask=has & (cs < C)[None, :], other=0.0)
        total = tl.dot(high.T, wide, total, input_precision=PRECISION)
    cells = out + (group.to(tl.int64) * H + hs[:, None]) * C + cs[None, :]
    tl.store(cells, total.to(out.dtype.element_ty), mask=(hs < H)[:, None] & (cs < C)[None, :])


def rows_times_weights(rows_RK: Tensor, weight_G: Tensor, sizes_G: Tensor, *, transposed: bool) -> Tensor:
    """(R, N): each row times its group's weight, which is (K, N), or (N, K) if `transposed`."""
    rows_RK, weight_G = rows_RK.contiguous(), weight_G.contiguous()
    num_channels = weight_G.shape[1 if transposed else 2]
    out_RN = rows_RK.new_empty(len(rows_RK), num_channels)
    block_k, is_short = SUMMED[rows_RK.dtype], rows_RK.itemsize == 2
    block_of_weight = [1, TILE, block_k] if transposed else [1, block_k, TILE]
    tiles, _ = find_tiles(sizes_G, len(rows_RK), TILE, rows_RK.device)
    num_tiles = (len(tiles) - 1) * triton.cdiv(num_channels, TILE)
    num_programs = (2 if is_short else 1) * _num_processors(rows_RK.device)
    rows_times_weights_kernel[(min(num_tiles, num_programs),)](
        TensorDescriptor.from_tensor(rows_RK, [TILE, block_k]),
        TensorDescriptor.from_tensor(weight_G, block_of_weight),
        out_RN,
        tiles,
        num_channels,
        rows_RK.shape[1],
        TRANSPOSED=transposed,
        PRECISION=_precision(),
        BLOCK_R=TILE,
        BLOCK_N=TILE,
        BLOCK_K=block_k,
        BAND=BAND,
        num_warps=4 if is_short else 8,
        num_stages=3,
    )
    return out_RN


def rows_times_rows(left_RH: Tensor, right_RC: Tensor, sizes_G: Tensor) -> Tensor:
    """(G, H, C): the sum over a group's rows of left x right."""
    left_RH, right_RC = left_RH.contiguous(), right_RC.contiguous()
    height, width = left_RH.shape[1], right_RC.shape[1]
    out_GHC = left_RH.new_empty(len(sizes_G), height, width)
    num_tiles = triton.cdiv(height, TILE) * triton.cdiv(width, TILE)
    _, groups = find_tiles(sizes_G, len(left_RH), TILE, left_RH.device)
    rows_times_rows_kernel[(len(sizes_G) * num_tiles,)](
        TensorDescriptor.from_tensor(left_RH, [SUMMED_ROWS, TILE]),
        TensorDescriptor.from_tensor(right_RC, [SUMMED_ROWS, TILE]),
        left_RH,
        right_RC,
        out_GHC,
        groups,
        height,
        width,
        PRECISION=_precision(),
        BLOCK_R=SUMMED_ROWS,
        BLOCK_H=TILE,
        BLOCK_C=TILE,
        num_warps=4 if left_RH.itemsize == 2 else 8,
        num_stages=4 if left_RH.itemsize == 2 else 3,
    )
    return out_GHC


def find_tiles(sizes_G: Tensor, num_rows: int, block_r: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tiles of up to `block_r` rows of one group: (1 + tiles, 3), their number, then each tile's group, first row and
    end; there may be unused tiles at the end. And (G, 3): the same of whole groups, largest first."""
    num_groups = len(sizes_G)
    tiles = torch.empty(1 + num_rows // block_r + num_groups, 3, dtype=torch.int32, device=device)
    groups = torch.empty(num_groups, 3, dtype=torch.int32, device=device)
    sizes_G = to_device(sizes_G, device)
    find_tiles_kernel[(num_groups,)](
        sizes_G, tiles, groups, num_groups, BLOCK_R=block_r, GROUPS=triton.next_power_of_2(num_groups)
    )
    return tiles, groups


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
