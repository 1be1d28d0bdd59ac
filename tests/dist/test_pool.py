"""The pool of ranks: one that hangs is reported with its stacks, and the next test has new ranks."""

import os
import time

import pytest


def sleep_as_first_rank() -> int:
    if os.environ["RANK"] == "0":
        time.sleep(600)
    return os.getpid()


def get_process_id() -> int:
    return os.getpid()


def test_ranks_that_hang_are_replaced(ranks):
    before = ranks.run(2, get_process_id)
    with pytest.raises(AssertionError, match=r"rank 0:\nno answer in time(.|\n)*in sleep_as_first_rank"):
        ranks.run(2, sleep_as_first_rank, seconds=1.0)
    assert not set(before) & set(ranks.run(2, get_process_id))
