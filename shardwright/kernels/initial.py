"""Initial values of a table: a function of (key, row, column) only, so any rank can compute any row.

Shape legend: U rows, C rows of a chunk, D columns, P pairs of columns.
"""

import torch
from torch import Tensor

from shardwright.kernels.rounding import splitmix64

CHUNK_ELEMENTS = 1 << 20  # computed at a time
_PAIR = 0x632BE59BD9B4E019  # odd, so that no two pairs of columns hash alike


def uniform_rows(key: int, rows_U: Tensor, dim: int, bound: float, dtype: torch.dtype) -> Tensor:
    """(U, D) uniform numbers between -bound and bound for rows `rows_U` of a table of `dim` columns."""
    out_UD = torch.empty(len(rows_U), dim, dtype=dtype, device=rows_U.device)
    pairs_P = torch.arange((dim + 1) // 2, device=rows_U.device) * _PAIR
    chunk_rows = max(1, CHUNK_ELEMENTS // dim)
    for start in range(0, len(rows_U), chunk_rows):
        rows_C = rows_U[start : start + chunk_rows]
        bits_CP = splitmix64(splitmix64(rows_C + key).unsqueeze(1) + pairs_P)
        halves_CP2 = torch.stack((bits_CP & 0xFFFFFFFF, bits_CP >> 32 & 0xFFFFFFFF), 2)
        numbers_CD = halves_CP2.view(len(rows_C), -1)[:, :dim].double()
        out_UD[start : start + chunk_rows] = ((numbers_CD + 0.5) * 2.0**-31 - 1) * bound
    return out_UD
