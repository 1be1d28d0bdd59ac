"""The Triton kernel of kernels/row_swaps.py."""

import triton
import triton.language as tl
from torch import Tensor

TILE_WORDS = 256  # of a row that a program copies at a time
TILE_ROWS = 4  # that a program copies at a time
PROGRAMS = 264  # that copy at a time; more would take processors from the step without being faster
HOST, LINES, WORDS, PART_FIELDS = map(tl.constexpr, range(4))  # of a part's struct, rows of int64
LINE, NEW_ROW, OLD_ROW, MOVE_FIELDS = map(tl.constexpr, range(1, 5))  # of a move, after its table


@triton.jit
def swap_rows(
    parts,
    row_numbers,
    moves,
    num_moves,
    WORD: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Copy some lines to their old rows in host memory, and their new rows to the lines; a row of -1 is none.

    `row_numbers`: by table, the address of the row of each line.
    """
    column = tl.arange(0, COLUMNS)
    for start in range(tl.program_id(0) * ROWS, num_moves, tl.num_programs(0) * ROWS):
        move = start + tl.arange(0, ROWS)
        has = move < num_moves
        own = moves + move.to(tl.int64) * MOVE_FIELDS
        table = tl.load(own, mask=has, other=0)
        line = tl.load(own + LINE, mask=has, other=0)
        new_row = tl.load(own + NEW_ROW, mask=has, other=-1)
        old_row = tl.load(own + OLD_ROW, mask=has, other=-1)
        for part in tl.static_range(PARTS):
            fields = parts + (table * PARTS + part) * PART_FIELDS
            words = tl.load(fields + WORDS)
            host = tl.load(fields + HOST).to(tl.pointer_type(WORD))
            lines = tl.load(fields + LINES).to(tl.pointer_type(WORD)) + line * words
            new_words, old_words = tl.where(new_row >= 0, words, 0), tl.where(old_row >= 0, words, 0)
            for tile in tl.static_range(TILES):
                cell = tile * COLUMNS + column
                is_new, is_old = cell[None, :] < new_words[:, None], cell[None, :] < old_words[:, None]
                new = tl.load((host + new_row * words)[:, None] + cell[None, :], mask=is_new, other=0)
                old = tl.load(lines[:, None] + cell[None, :], mask=is_old, other=0)
                tl.store((host + old_row * words)[:, None] + cell[None, :], old, mask=is_old)
                tl.store(lines[:, None] + cell[None, :], new, mask=is_new)
        numbers = tl.load(row_numbers + table).to(tl.pointer_type(tl.int64))
        tl.store(numbers + line, new_row, mask=new_row >= 0)


def launch(
    structs: Tensor, row_numbers: Tensor, moves: Tensor, word_bytes: int, num_parts: int, max_words: int
) -> None:
    """Issue moves, as of kernels/cache_index.py."""
    columns, num = min(TILE_WORDS, max(16, triton.next_power_of_2(max_words))), len(moves)
    swap_rows[(min(PROGRAMS, triton.cdiv(num, TILE_ROWS)),)](
        structs,
        row_numbers,
        moves,
        num,
        WORD=tl.int32 if word_bytes == 4 else tl.int16,
        PARTS=num_parts,
        ROWS=TILE_ROWS,
        COLUMNS=columns,
        TILES=triton.cdiv(max_words, columns),
    )
