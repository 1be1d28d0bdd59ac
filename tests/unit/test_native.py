"""The compiled library: offsets of lengths, retained memory, and the fallback without it."""

import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright import library
from shardwright.errors import UserError
from shardwright.kernels import native


def test_the_compiled_library_loads():
    assert native.native_library() is not None


PRINT_PAGE_FAULTS = """
import resource, torch
from shardwright.kernels.native import retain_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(12 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
if retain_freed_memory():
    faults()
    print(first, faults())
"""


def test_freed_memory_is_retained():
    result = subprocess.run([sys.executable, "-c", PRINT_PAGE_FAULTS], capture_output=True, text=True, check=True)
    if not result.stdout:
        pytest.skip("this system's allocator has no such setting")
    first, second = map(int, result.stdout.split())
    assert second < first / 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(lengths=st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_offsets_equal_a_plain_sum(dtype, lengths):
    expected = [0]
    for length in lengths:
        expected.append(expected[-1] + length)
    assert native.lengths_to_offsets(torch.tensor(lengths, dtype=dtype)).tolist() == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_large_offsets(threads):
    lengths = torch.randint(0, 100, (200_001,))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        offsets = native.lengths_to_offsets(lengths)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(offsets[1:], lengths.cumsum(0)) and offsets[0] == 0


@pytest.mark.parametrize("position", [0, 7, 150_000])
def test_errors_name_a_negative_length(position):
    lengths = torch.ones(200_000, dtype=torch.int64)
    lengths[position] = -3
    with pytest.raises(UserError, match=rf"lengths\[{position}\] is -3; a length is 0 or more"):
        native.lengths_to_offsets(lengths)


def test_strided_and_two_dimensional_lengths():
    lengths = torch.arange(12).view(3, 4).t()
    assert torch.equal(native.lengths_to_offsets(lengths)[1:], lengths.reshape(-1).cumsum(0))


def test_fake_tensors_and_compile_accept_the_operator():
    native.lengths_to_offsets(torch.ones(3, dtype=torch.int64))
    torch.library.opcheck(torch.ops.shardwright.lengths_to_offsets.default, (torch.arange(5),))


def test_without_the_library_the_reference_runs_with_one_warning(monkeypatch):
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    library.native_library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no compiled kernels"):
            assert native.lengths_to_offsets(torch.tensor([2, 3])).tolist() == [0, 2, 5]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            native.lengths_to_offsets(torch.tensor([1]))
        with pytest.raises(UserError, match="lengths\\[1\\] is -1"):
            native.lengths_to_offsets(torch.tensor([1, -1]))
    finally:
        library.native_library.cache_clear()
