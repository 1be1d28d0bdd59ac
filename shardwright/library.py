"""Load the shared library of csrc/ without torch, since loader workers and readers use it, too.

Uses ctypes instead of a libtorch extension: the library depends on no torch ABI, so one wheel works with every torch.
"""

import ctypes
import importlib.util
import warnings
from ctypes import c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from types import MappingProxyType
from typing import Any

# Return type, then argument types, by function name.
SIGNATURES = MappingProxyType(
    {
        "lengths_to_offsets_i32": (c_int64, c_void_p, c_int64, c_void_p),
        "lengths_to_offsets_i64": (c_int64, c_void_p, c_int64, c_void_p),
        "falls": (c_int64, c_void_p, c_int64),
        "parse_rows": (c_int64, c_char_p, c_int64, c_int32, c_void_p),
        "codes": (None, c_void_p, c_void_p, c_int64, c_int64, c_void_p),
        "hashed_rows": (None, c_void_p, c_int64, c_uint64, c_int64, c_void_p),
        "vocabulary_rows": (None, c_void_p, c_int64, c_void_p, c_void_p, c_uint64, c_void_p),
        "vocabulary_slots": (None, c_void_p, c_int64, c_uint64, c_void_p),
        "counter_new": (c_void_p, c_int64),
        "counter_free": (None, c_void_p),
        "counter_add": (None, c_void_p, c_void_p, c_int64),
        "counter_size": (c_int64, c_void_p),
        "counter_error": (c_int64, c_void_p),
        "counter_distinct": (c_double, c_void_p),
        "counter_dump": (None, c_void_p, c_void_p, c_void_p),
        "use_threads": (None, c_int64),
        "huge_pages": (c_int64, c_void_p, c_int64, c_int64),
        "keep_memory": (c_int64,),
        "trim_memory": (c_int64,),
        "read_rows": (c_uint64, c_void_p, c_int64, c_void_p, c_int64),
        "rewrite_rows": (None, c_void_p, c_int64, c_void_p, c_int64),
        "level": (c_char_p,),
        "set_level": (c_int64, c_char_p),
        "lookup": (c_int64, c_void_p, c_void_p, c_void_p),
        "weight_gradients": (c_int64, c_void_p, c_void_p, c_void_p, c_void_p),
        "distinct": (c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        "gather": (None, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p),
        "count_pieces": (c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p),
        "move_pieces": (None, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, *[c_void_p] * 3),
        "pair_dots": (None, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p),
        "pair_gradients": (None, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p),
        "rows_times_matrices": (None, *[c_void_p] * 3, *[c_int64] * 5, c_void_p),
        "rows_times_rows": (None, *[c_void_p] * 3, *[c_int64] * 6, c_void_p),
        "gelu": (None, c_void_p, c_int64, c_int64, c_void_p),
        "gelu_gradient": (None, c_void_p, c_void_p, c_int64, c_int64, c_void_p),
        "swiglu": (None, c_void_p, c_void_p, c_int64, c_int64, c_void_p),
        "swiglu_gradient": (None, *[c_void_p] * 3, c_int64, c_int64, *[c_void_p] * 2),
        "silu_attention": (None, c_void_p, c_void_p, c_int64, c_void_p),
        "silu_attention_gradients": (None, c_void_p, c_void_p, c_int64, *[c_void_p] * 3),
        "softmax_attention": (None, c_void_p, c_double, c_void_p),
        "softmax_attention_gradients": (None, c_void_p, c_double, c_void_p, c_void_p, c_int64),
        "update": (c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p),
        "adam": (None, c_void_p, c_void_p, c_int64),
        "sum_of_squares": (c_double, c_void_p, c_int64),
        "sums_counted": (c_void_p, c_void_p, c_int64, *[c_void_p] * 4),
        "sums_taken": (None, c_void_p, c_void_p, c_void_p),
        "cache_new": (c_void_p, c_int64, c_int64, c_int64),
        "cache_free": (None, c_void_p),
        "cache_announce": (c_int64, c_void_p, c_int64, c_void_p),
        "cache_place": (c_int64, c_void_p, c_int64, *[c_void_p] * 8),
        "cache_place_rows": (c_int64, c_void_p, c_int64, c_int64, *[c_void_p] * 3, c_int64, *[c_void_p] * 6),
        "cache_forget": (None, c_void_p),
        "cache_release": (None, c_void_p, c_int64, c_void_p, c_void_p),
        "cache_find": (None, c_void_p, c_void_p, c_int64, c_void_p),
        "cache_list": (c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64),
        "cache_away": (c_int64, c_void_p),
        "id_map_new": (c_void_p, c_void_p, c_void_p),
        "id_map_free": (None, c_void_p),
        "id_map_place": (c_int64, c_void_p, c_void_p, c_int64, c_int64, *[c_void_p] * 6),
        "id_map_release": (None, c_void_p, c_void_p, c_int64),
        "id_map_find": (None, c_void_p, c_void_p, c_int64, c_void_p),
        "id_map_list": (c_int64, c_void_p, c_int64, *[c_void_p] * 4),
        "id_map_load": (c_int64, c_void_p, c_int64, *[c_void_p] * 3, c_int64),
        "id_map_remove": (None, c_void_p, c_void_p, c_int64),
        "id_map_has_lost_removed": (c_int64, c_void_p),
        "id_map_take_removed": (c_int64, c_void_p, c_void_p),
        "id_map_set_batch": (None, c_void_p, c_int64),
        "id_map_numbers": (None, c_void_p, c_void_p),
        "page_readers_new": (c_void_p, c_int64, c_int64),
        "page_readers_free": (None, c_void_p),
        "row_log_new": (c_void_p, c_char_p, *[c_int64] * 3, c_void_p, c_int64),
        "row_log_free": (None, c_void_p),
        "row_logs_read": (c_int64, c_void_p, c_int64, *[c_void_p] * 4, c_int64, c_void_p, c_void_p),
        "row_log_write": (c_int64, *[c_void_p] * 3, c_int64, c_void_p, c_int64),
        "row_log_compact": (c_int64, c_void_p, c_double, c_int64),
        "row_log_snapshot": (c_int64, c_void_p),
        "row_log_release": (None, c_void_p, c_int64),
        "row_log_read_snapshot": (c_int64, c_void_p, *[c_int64] * 3, c_void_p, c_int64, c_void_p),
        "row_log_numbers": (None, c_void_p, c_void_p),
        "row_log_error": (None, c_void_p, c_char_p, c_int64),
        "read_pages": (c_int64, c_int64, c_void_p, *[c_int64] * 3),
        "load_acquire": (c_int64, c_void_p),
        "store_release": (None, c_void_p, c_int64),
    }
)


@cache
def native_library() -> Any | None:
    """The loaded library; None, with a warning, if this installation has no compiled kernels."""
    spec = importlib.util.find_spec("shardwright._native")
    if spec is None or spec.origin is None:
        warnings.warn(
            "no compiled kernels in this installation; using the slower reference implementation", stacklevel=2
        )
        return None
    native = ctypes.CDLL(spec.origin)
    for name, (return_type, *argument_types) in SIGNATURES.items():
        function = getattr(native, f"shardwright_{name}")
        function.restype, function.argtypes = return_type, argument_types
    return native
